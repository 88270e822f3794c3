"""What collections of sequences give, compared."""

from collections.abc import Mapping

import torch
from torchrec import JaggedTensor


def assert_same(actual: Mapping[str, JaggedTensor], expected: Mapping[str, JaggedTensor]) -> None:
    """Equal keys in order, and dtypes and bits of all that a ``JaggedTensor`` has."""
    assert list(actual.keys()) == list(expected.keys())
    for key, jagged in expected.items():
        for part in ("values", "lengths", "weights_or_none"):
            mine, other = getattr(actual[key], part)(), getattr(jagged, part)()
            torch.testing.assert_close(mine, other, rtol=0, atol=0, msg=lambda m, at=(key, part): f"{at}: {m}")
