"""The constant arguments of FBGEMM's table-batched kernels, computed once per lookup."""

from __future__ import annotations

from itertools import accumulate

import torch

from recfx.ir.tables import TableSpec
from recfx.lowering.registry import LookupSpec

POOLING = {"SUM": 0, "MEAN": 1}


class Layout:
    """The constant arguments of FBGEMM's kernels, for all tables of a lookup or for one of them."""

    def __init__(self, spec: LookupSpec) -> None:
        # The weights are not kept: they may be replaced, and the old ones must then be freed.
        self.tables, self.optimizers = spec.tables, spec.optimizers
        self.base = torch.empty(1, dtype=spec.weights[0].dtype, device="cpu")
        self.pooling = POOLING[spec.combine]
        features = [len(table.feature_names) for table in spec.tables]
        columns = [count * table.embedding_dim for count, table in zip(features, spec.tables, strict=True)]
        self._first_features, self._first_columns = [0, *accumulate(features)], [0, *accumulate(columns)]
        self.total_dim = self._first_columns[-1]
        self.whole = Part(spec.tables, range(len(spec.tables)), 0, 0)
        self._parts: dict[int, Part] = {}
        self._last: tuple[tuple[int, ...], torch.Tensor] | None = None

    def part(self, table: int) -> Part:
        """The arguments for one table alone."""
        if table not in self._parts:
            first_feature, first_column = self._first_features[table], self._first_columns[table]
            self._parts[table] = Part(self.tables, range(table, table + 1), first_feature, first_column)
        return self._parts[table]

    def weight_offsets(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """``[F]`` distances in elements from the base to each feature's table; recomputed only if a table has moved."""
        addresses = tuple(weight.data_ptr() for weight in weights)
        if self._last is None or self._last[0] != addresses:
            self._last = addresses, distances(self.base, addresses, self.whole.table_of_feature)
        return self._last[1]


class Part:
    """The constant arguments for some adjacent tables; columns and bags are still those of the whole lookup.

    Args:
        described: all tables of the lookup.
        tables: the positions of the adjacent tables.
        first_feature: the position of their first feature in the lookup.
        first_column: their first column in the lookup.
    """

    def __init__(self, described: tuple[TableSpec, ...], tables: range, first_feature: int, first_column: int) -> None:
        self.tables = tables
        self.table_of_feature = [table for table in tables for _ in described[table].feature_names]
        self.features = first_feature, first_feature + len(self.table_of_feature)
        dims = [described[table].embedding_dim for table in self.table_of_feature]
        self.max_dim = max(described[table].embedding_dim for table in tables)
        self.dim_offsets = torch.tensor([*accumulate(dims, initial=first_column)], dtype=torch.int32, device="cpu")
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
    """``[F]`` int64: how many elements after ``base`` each feature's table begins (before it, if negative)."""
    origin, size = base.data_ptr(), base.element_size()
    return torch.tensor(
        [(addresses[table] - origin) // size for table in table_of_feature], dtype=torch.int64, device="cpu"
    )
