"""What kernels are run with: tables and a batch, an index that is full; and what a step of a rule makes of a case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from recfx.kernels.index.find_rows import IndexFacts
from recfx.kernels.index.index_buffers import IndexView
from recfx.kernels.index.slot_table import insert_into_slots, slot_count
from recfx.kernels.step.fused_step import step_touched_rows
from recfx.optim.rules.rule import Rule

GROUP = {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.01, "eta": 0.5, "momentum": 0.9}
STEPS = 3.0
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_EXTREMES = (0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63))


class LookupCase:
    """Rows of -1, empty bags of at most ``longest`` ids, and two features that share the first table, the smallest."""

    def __init__(
        self, dims: list[int], batch_size: int, dtype: torch.dtype = torch.float32, seed: int = 0, rows: int = 7,
        longest: int = 4,
    ) -> None:  # fmt: skip
        draw = torch.Generator().manual_seed(seed)
        self.dims, self.batch_size, self.seed = dims, batch_size, seed
        self.table_of_feature = [0, *range(len(dims))]
        self.weights = [torch.randn(rows + table, dim, generator=draw).to(dtype) for table, dim in enumerate(dims)]
        self.lengths = torch.randint(0, longest + 1, (len(self.table_of_feature) * batch_size,), generator=draw)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        self.borders = self.offsets[::batch_size].contiguous()  # of the features
        ends = torch.tensor([rows + table for table in self.table_of_feature]).repeat_interleave(self.borders.diff())
        self.rows = torch.randint(0, 2**40, ends.shape, generator=draw) % (ends + 1) - 1
        self.scales = torch.rand(self.rows.numel(), generator=draw)
        self.gradients = torch.randn(batch_size, sum(dims) + dims[0], generator=draw)

    def __str__(self) -> str:
        dims, dtype = ", ".join(map(str, dict.fromkeys(self.dims))), str(self.weights[0].dtype).removeprefix("torch.")
        tables = f"{len(self.dims)} tables of {len(self.weights[0]):,} rows, dims {dims}, {dtype}"
        return f"{tables}, batch {self.batch_size:,} with {self.rows.numel():,} ids"

    @property
    def are_means(self) -> bool:
        """Whether bags are divided by their lengths, in every third case; in another third, sums are weighted."""
        return self.seed % 3 == 1

    @property
    def weights_of_ids(self) -> Tensor | None:
        return self.scales if self.seed % 3 == 2 else None

    def bytes_of_lookup(self, bits: int = 32) -> int:
        """The bytes of ids, of the rows that they look up, of offsets and of sums."""
        dims = [self.dims[table] for table in self.table_of_feature]
        rows = sum(count * (8 + dim * bits // 8) for count, dim in zip(self.borders.diff().tolist(), dims, strict=True))
        return rows + 8 * self.offsets.numel() + 4 * self.batch_size * sum(dims)

    def bytes_of_step(self, rule: Rule) -> int:
        """The bytes of ids, of a gradient for each, and of touched rows with their states, read and written once."""
        tables = torch.tensor(self.table_of_feature).repeat_interleave(self.borders.diff())[self.rows >= 0]
        touched = ((tables << 40) + self.rows[self.rows >= 0]).unique() >> 40
        in_row = [4 * (dim + sum(1 if state.per_row else dim for state in rule.states)) for dim in self.dims]
        return self.bytes_of_lookup() + 2 * int(torch.tensor(in_row)[touched].sum())


def cases(quick: bool) -> Iterator[LookupCase]:
    """The smallest first."""
    sizes = [([1], 1, DTYPES[0]), ([4, 3], 3, DTYPES[0]), ([64, 33, 5], 9, DTYPES[0])]
    if not quick:
        sizes += [([64, 8], 9, DTYPES[1]), ([128, 48], 17, DTYPES[2]), ([1000, 1024], 4, DTYPES[0])]
    yield from (LookupCase(*size, seed) for seed, size in enumerate(sizes))


def step_(rule: Rule, group: Mapping[str, Any], mean: bool, *arguments: Any) -> None:
    """A rule's step, in place, with the ``arguments`` of ``fused_step_``; ``mean``: sums were divided by lengths."""
    rows, offsets, gradients, weights, first, second, table_of_feature, is_stepped, *_ = arguments
    (gradients,) = gradients if isinstance(gradients, list) else (gradients,)
    lengths, batch_size, column = offsets.diff(), gradients.shape[0], 0
    bags = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in weights]
    for feature, table in enumerate(table_of_feature):
        own, dim = (bags // batch_size == feature) & (rows >= 0), weights[table].shape[1]
        by_row = gradients[bags[own] % batch_size, column : column + dim]
        parts[table].append((rows[own], by_row / lengths[bags[own], None] if mean else by_row))
        column += dim

    def update(values: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        return rule.update(values, gradient, state, STEPS, group)

    for table in (table for table, is_one in enumerate(is_stepped) if is_one):
        state = {kind.name: of[table] for kind, of in zip(rule.states, (first, second), strict=False)}
        own_rows, by_row = map(torch.cat, zip(*parts[table], strict=True))
        step_touched_rows(update, weights[table], own_rows, by_row, state)


def index_read(count: int) -> tuple[Any, ...]:
    """The arguments of ``recfx::find_rows_triton``: full indexes, and a table without one; extremes and absent ids."""
    draw, rows, extremes = torch.Generator().manual_seed(count), 400, torch.tensor(_EXTREMES)
    slots: list[Tensor] = []
    side_rows, facts, ids = [], [], []
    for table, buckets in enumerate((0, 3)):
        indexed = torch.cat([extremes[1:], torch.randint(2**40, 2**62, (rows - 20,), generator=draw)])
        own, side_row = torch.full((slot_count(rows), 2), -1), torch.full((1,), -1)
        insert_into_slots(indexed, torch.arange(indexed.numel()), own, side_row)
        view = IndexView(own, side_row, 10 * table, buckets, seed=7)
        facts.append(IndexFacts.of(view, table, sum(map(len, slots)), len(own), rows))
        slots.append(own)
        side_rows.append(side_row)
        some = torch.cat([indexed, extremes, torch.arange(30), torch.randint(-(2**62), 0, (300,), generator=draw)])
        ids.append(some[torch.randperm(some.numel(), generator=draw)][:count])
    facts.append(IndexFacts.without_index())
    ends = torch.tensor([len(ids[0]), 2 * len(ids[0]), 2 * len(ids[0]) + count])
    indexes = (torch.cat(slots), torch.cat([*side_rows, torch.full((1,), -1)]), torch.tensor(facts))
    return torch.cat([*ids, torch.arange(count)]), ends, *indexes
