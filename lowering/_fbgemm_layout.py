"""The constant arguments of FBGEMM's table-batched kernels, made once a lookup."""

from __future__ import annotations

from itertools import accumulate

import torch

from recfx.ir.tables import TableSpec
from recfx.lowering.registry import LookupSpec

POOLING = {"SUM": 0, "MEAN": 1}


class Layout:
    """The constant arguments of FBGEMM's kernels, for all tables of a lookup or for one of them."""

    def __init__(self, spec: LookupSpec) -> None:
        # Not the weights: they may be replaced, and the old ones must be freed.
        self.tables, self.optimizers = spec.tables, spec.optimizers
        self.base = torch.empty(1, dtype=spec.weights[0].dtype, device="cpu")
        self.pooling = POOLING[spec.pooling]
        self.whole = Part(spec.tables, list(range(len(spec.tables))))
        self._parts: dict[int, Part] = {}
        self._last: tuple[tuple[int, ...], torch.Tensor] | None = None

    def part(self, table: int) -> Part:
        """The arguments for one table alone."""
        if table not in self._parts:
            self._parts[table] = Part(self.tables, [table])
        return self._parts[table]

    def weight_offsets(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """``[F]`` distances, in elements, from the base to each feature's table; made again only when a table moves."""
        addresses = tuple(weight.data_ptr() for weight in weights)
        if self._last is None or self._last[0] != addresses:
            self._last = addresses, distances(self.base, addresses, self.whole.table_of_feature)
        return self._last[1]


class Part:
    """The constant arguments for some adjacent tables; columns and bags stay those of the whole lookup."""

    def __init__(self, described: tuple[TableSpec, ...], tables: list[int]) -> None:
        self.tables = tables
        every_feature = [table for table, each in enumerate(described) for _ in each.feature_names]
        first = every_feature.index(tables[0])
        self.table_of_feature = [table for table in every_feature if table in tables]
        self.features = first, first + len(self.table_of_feature)
        columns = [0, *accumulate(described[table].embedding_dim for table in every_feature)]
        self.total_dim = columns[-1]
        self.max_dim = max(described[table].embedding_dim for table in tables)
        self.dim_offsets = torch.tensor(
            columns[self.features[0] : self.features[1] + 1], dtype=torch.int32, device="cpu"
        )
        starts, total = {}, 0
        for table in tables:
            starts[table] = total
            total += described[table].num_embeddings
        cumulative = [starts[table] for table in self.table_of_feature] + [total]
        self.row_offsets = torch.tensor(cumulative, dtype=torch.int64, device="cpu")
        self.row_bits = max(1, total.bit_length())
        self.at_start = torch.zeros(len(self.table_of_feature), dtype=torch.int64, device="cpu")
        self.placements = torch.zeros(len(self.table_of_feature), dtype=torch.int32, device="cpu")


def distances(base: torch.Tensor, addresses: tuple[int, ...], table_of_feature: list[int]) -> torch.Tensor:
    """``[F]`` int64: how many elements after ``base`` (before it, if negative) each feature's table begins."""
    origin, size = base.data_ptr(), base.element_size()
    return torch.tensor(
        [(addresses[table] - origin) // size for table in table_of_feature], dtype=torch.int64, device="cpu"
    )
