"""Scripts of TorchRec's calls train the same with ``recfx.convert`` inserted where the model is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import recfx
from recfx.collections.sharding.collection import sharded_collections
from tests.sharding import scripts
from tests.sharding.ranks import ranks

SCRIPTS: dict[str, Callable[..., scripts.Result]] = {
    "golden training": scripts.golden_training,
    "two-tower retrieval": scripts.two_tower_retrieval,
    "public DLRM, Adagrad": functools.partial(scripts.public_dlrm, adagrad=True),
    "public DLRM, SGD": functools.partial(scripts.public_dlrm, adagrad=False),
}


def both(rank: int, world_size: int, name: str) -> list[Any]:
    """The script as it is, and with the line."""
    converted = []

    def line(model: torch.nn.Module) -> torch.nn.Module:
        converted.append(recfx.convert(model))
        return converted[0]

    answers = [SCRIPTS[name](rank, lambda model: model), SCRIPTS[name](rank, line)]
    assert sharded_collections(converted[0]), "the converted collection stayed unsharded"
    return answers


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_one_line_changes_nothing(name: str, world_size: int) -> None:
    for stock, ours in ranks(world_size).run(both, name):
        torch.testing.assert_close(ours[0], stock[0], rtol=1e-5, atol=1e-6)
        assert ours[1].keys() == stock[1].keys()
        # After STEPS steps. FBGEMM sums a row's gradients in another order, and Adagrad divides by the sum's size.
        torch.testing.assert_close(ours[1], stock[1], rtol=1e-4, atol=1e-5)
