"""``dedup_ids`` and ``expand_rows``: only different ids go to other ranks, and all ids get the rows that come back."""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.ir.operator_graph import names_in
from recfx.kernels.route.different_ids import different_ids, sum_rows
from recfx.runtime.bags import as_sent, keep_ids, without_weights
from recfx.runtime.base import NodeModule
from recfx.runtime.lowered import Lowered


class Inverse(NamedTuple):
    """Which of the different ids of its key each id is, int64 ``[n]``, key by key; and how many ids, and different ids,
    each key has.
    """

    numbers: torch.Tensor
    ids: list[int]
    different: list[int]


class DedupIds(NodeModule):
    """Leave out all but the first of the equal ids of a key, where ``deduped`` says so. Reports read ``ids`` and
    ``different``: how many ids of each deduplicated key have come in training, and how many of them were sent.
    """

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        deduped = names_in(of.node, "deduped")
        self.deduped = [table.name in deduped for table in of.collection.tables for _ in table.embedding_names]
        self.on_host = of.collection.ids_on_host
        self.ids, self.different = [0] * len(self.deduped), [0] * len(self.deduped)

    def forward(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Inverse]:
        """``features``: as selected. Returns ids in the same bags, int64, each at its first place; and the inverse."""
        features = without_weights(as_sent(features, self.on_host))  # they multiply nothing here, and do not travel
        ids = features.length_per_key()
        is_first, numbers, different = different_ids(features.values(), ids, self.deduped)
        if self.training:
            for key, deduped in enumerate(self.deduped):
                if deduped:
                    self.ids[key] += ids[key]
                    self.different[key] += different[key]
        return keep_ids(features, features.values(), is_first), Inverse(numbers, ids, different)


class ExpandRows(NodeModule):
    """Give every id its row."""

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        positions = of.collection.keys.positions
        self.keys = [positions[columns.key] for columns in of.graph.columns(of.node)]

    def forward(self, rows: torch.Tensor, inverse: Inverse) -> torch.Tensor:
        """``rows``: ``[different ids, D]``, key by key. Returns ``[n, D]``, in the order of the ids."""
        of_key, begin = inverse.numbers.split(inverse.ids), 0
        places = []
        for key in self.keys:
            places.append(of_key[key] + begin if begin else of_key[key])
            begin += inverse.different[key]
        joined = places[0] if len(places) == 1 else torch.cat(places)
        return _Expand.apply(rows, joined.to(rows.device, non_blocking=True))


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
