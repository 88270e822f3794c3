"""Names of torch, TorchRec and FBGEMM that recfx uses are known to be in the oldest and in the newest set."""

from tests.tools.matrix import names


def test_every_name_is_known() -> None:
    known = names.KNOWN.read_text().split()
    assert names.used_names() == known, "make names"
