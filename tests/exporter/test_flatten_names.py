"""Names of modules in files."""

import pytest

from recfx.exporter.arguments import identifier


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("over.layers.0", "over_layers_0"),
        ("größe", "gr__e"),  # TorchScript knows ASCII alone
        ("0.weight", "module_0_weight"),
        ("class", "module_class"),
        ("", "module_"),
        ("a.b", "a_b_2"),
    ],
)
def test_identifiers(path: str, wanted: str) -> None:
    assert identifier(path, {"a_b", "a_b_1"}) == wanted
