"""``expand_rows``: the rows of different ids, which have come back from other ranks, become those of all ids."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from recfx.kernels.route.different_ids import sum_rows
from recfx.runtime.base import NodeModule
from recfx.runtime.dedup_ids import Inverse


class ExpandRows(NodeModule):
    """Give every id its row.

    Args:
        keys: the positions, among the keys of the collection, of those whose rows it gets.
    """

    def __init__(self, keys: list[int]) -> None:
        super().__init__()
        self.keys = keys

    def forward(self, rows: torch.Tensor, inverse: Inverse) -> torch.Tensor:
        """``rows``: ``[different ids, D]``, key by key. Returns ``[n, D]``, in the order of the ids."""
        of_key, begin = inverse.numbers.split(inverse.ids), 0
        places = []
        for key in self.keys:
            places.append(of_key[key] + begin if begin else of_key[key])
            begin += inverse.different[key]
        joined = places[0] if len(places) == 1 else torch.cat(places)
        expanded: torch.Tensor = _Expand.apply(rows, joined.to(rows.device, non_blocking=True))
        return expanded


class _Expand(torch.autograd.Function):
    """A row may have many places; the backward adds up the gradients of all of them, in the order of the places."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.places, ctx.rows = places, rows.shape[0]
        return rows.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_rows(gradient, ctx.places, ctx.rows), None
