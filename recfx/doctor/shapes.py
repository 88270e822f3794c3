"""The shapes that kernels are checked with, as arguments of their operators on the CPU, the smallest first.

Also what one step of a rule makes of a batch, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfx.kernels.index.find_rows import IndexFacts, ReadIndexes
from recfx.kernels.index.index_buffers import IndexView
from recfx.kernels.index.slot_table import insert_into_slots, slot_count
from recfx.kernels.lookup.quantized_rows import BITS, quantize_rows
from recfx.kernels.route.bucketize import WHOLE, Routes
from recfx.kernels.step.fused_step import step_touched_rows
from recfx.kernels.step.row_initialization import initialization_key
from recfx.optim.rules.rule import Rule

GROUP = {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.01, "eta": 0.5, "momentum": 0.9}
STEPS = 3.0
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES: tuple[tuple[list[int], int, torch.dtype], ...] = (
    ([1], 1, torch.float32),
    ([4, 3], 3, torch.float32),
    ([64, 33, 5], 9, torch.float32),
    ([64, 8], 9, torch.float16),
    ([128, 48], 17, torch.bfloat16),
    ([1000, 1024], 4, torch.float32),
)
"""The dims of tables, the batch size, and the dtype."""

_EXTREMES = (0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63))


class Shape(NamedTuple):
    """What a kernel is called with: a few words, and the arguments, on the CPU."""

    text: str
    arguments: tuple[Any, ...]


class LookupCase:
    """Rows of -1, empty bags, and two features that share the first table.

    Args:
        dims: of the tables, which have seven rows and more.
        batch_size: of the two features and more.
        dtype: of the tables.
        seed: of everything that is drawn.
    """

    def __init__(self, dims: list[int], batch_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.dims, self.batch_size = dims, batch_size
        self.table_of_feature = [0, *range(len(dims))]
        self.weights = [torch.randn(7 + table, dim, generator=draw).to(dtype) for table, dim in enumerate(dims)]
        lengths = torch.randint(0, 5, (len(self.table_of_feature), batch_size), generator=draw)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
        self.borders = self.offsets[::batch_size].contiguous()  # of the features
        rows = [
            torch.randint(-1, self.weights[table].shape[0], (int(own.sum()),), generator=draw)
            for table, own in zip(self.table_of_feature, lengths, strict=True)
        ]
        self.rows = torch.cat(rows)
        self.scales = torch.rand(self.rows.numel(), generator=draw)
        self.gradients = torch.randn(batch_size, sum(dims) + dims[0], generator=draw)


def stepped(
    rows: Tensor,
    offsets: Tensor,
    gradients: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    rule: Rule,
    states: list[list[Tensor]],
    is_stepped: list[bool],
    mean: bool,
    group: Mapping[str, Any] = GROUP,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Copies of weights and states after one step of the rule's own ``update``.

    Args:
        rows, offsets, gradients, weights, table_of_feature: as for ``recfx.kernels.step.fused_step.fused_step_``.
        rule: of the optimizer.
        states: by state of the rule, then by table.
        is_stepped: of each table.
        mean: whether sums were divided by the lengths of bags.
        group: the settings of the optimizer.
    """
    new_weights, new_states = [weight.clone() for weight in weights], [[state.clone() for state in of] for of in states]
    lengths, batch_size, column = offsets.diff(), gradients.shape[0], 0
    bags = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in weights]
    for feature, table in enumerate(table_of_feature):
        own, dim = (bags // batch_size == feature) & (rows >= 0), weights[table].shape[1]
        by_row = gradients[bags[own] % batch_size, column : column + dim]
        parts[table].append((rows[own], by_row / lengths[bags[own], None] if mean else by_row))
        column += dim
    for table in (table for table, is_one in enumerate(is_stepped) if is_one):
        own_rows, by_row = map(torch.cat, zip(*parts[table], strict=True))
        state = {kind.name: of[table] for kind, of in zip(rule.states, new_states, strict=True)}
        step_touched_rows(partial(_update, rule, group), new_weights[table], own_rows, by_row, state)
    return new_weights, new_states


def _update(rule: Rule, group: Mapping[str, Any], values: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
    return rule.update(values, gradient, state, STEPS, group)


def lookups(quick: bool) -> Iterator[tuple[str, LookupCase]]:
    """Tables and a batch of every size."""
    for dims, batch_size, dtype in SIZES[: 3 if quick else None]:
        name = str(dtype).removeprefix("torch.")
        yield f"dims {', '.join(map(str, dims))}, batch {batch_size}, {name}", LookupCase(dims, batch_size, dtype)


def pooled(quick: bool) -> Iterator[Shape]:
    """Sums, means and weighted sums; and the rows of the first table, which are not pooled."""
    for text, case in lookups(quick):
        for kind in ("sum", "mean", "weighted"):
            scales = case.scales if kind == "weighted" else None
            tables = (case.weights, case.table_of_feature)
            yield Shape(f"{text}, {kind}", (case.rows, case.offsets, *tables, kind == "mean", scales))
        borders = case.borders[:3]
        rows = case.rows[: int(borders[-1])]
        yield Shape(f"{text}, not pooled", (rows, borders, case.weights[:1], [0, 0], False, None, True))


def weight_gradients(quick: bool) -> Iterator[Shape]:
    """Gradients of weighted sums."""
    for text, case in lookups(quick):
        yield Shape(text, (case.rows, case.offsets, case.gradients, case.weights, case.table_of_feature))


def steps(rule: Rule, of_rule: tuple[Any, ...], on_host: bool, quick: bool) -> Iterator[Shape]:
    """A step of a rule, of some tables; ``of_rule`` are the arguments of the operator that name the rule."""
    for place, (text, case) in enumerate(lookups(quick)):
        draw = torch.Generator().manual_seed(place)
        states = [[torch.rand(s.shape(*weight.shape), generator=draw) for weight in case.weights] for s in rule.states]
        first, second = (*states, [], [])[:2]
        is_stepped = [table != 1 or place % 2 == 0 for table in range(len(case.dims))]
        numbers = list(rule.step_numbers(STEPS, GROUP))
        mean = place % 2 == 1
        batch = (case.rows, case.offsets, [case.gradients] if on_host else case.gradients)
        tables = (case.weights, first, second, case.table_of_feature, is_stepped)
        settings = (numbers * len(case.weights), mean, None, None) if on_host else (numbers, mean, None)
        yield Shape(f"{text}{', mean' if mean else ''}", (*batch, *tables, *of_rule, *settings))


def quantized(quick: bool) -> Iterator[Shape]:
    """Codes of 8 and 4 bits, at even addresses and at odd ones."""
    for text, case in lookups(quick):
        for bits in BITS:
            for alignment in (1, 16):
                tables = [quantize_rows(weight.float(), bits, alignment) for weight in case.weights]
                features = (case.table_of_feature, False, case.scales)
                arguments = (case.rows, case.offsets, tables, case.dims, bits, *features)
                yield Shape(f"{text.rpartition(',')[0]}, {bits} bits, rows at multiples of {alignment}", arguments)


def index_reads(quick: bool) -> Iterator[Shape]:
    """Full indexes with dense and with shared rows, a table without one; the extremes among the ids, and absent ids."""
    for count in (1, 5) if quick else (1, 5, 700):
        yield Shape(f"{3 * count} ids in 3 tables", index_read(count))


def index_read(count: int) -> tuple[Any, ...]:
    """The arguments of ``recfx::find_rows_triton``, with ``count`` ids for each table."""
    draw = torch.Generator().manual_seed(count)
    rows = 400
    slots: list[Tensor] = []
    side_rows, facts, ids = [], [], []
    extremes = torch.tensor(_EXTREMES)
    for table, buckets in enumerate((0, 3)):
        indexed = torch.cat([extremes[1:], torch.randint(2**40, 2**62, (rows - 20,), generator=draw)])
        of_table, side_row = torch.full((slot_count(rows), 2), -1), torch.full((1,), -1)
        insert_into_slots(indexed, torch.arange(indexed.numel()), of_table, side_row)
        view = IndexView(of_table, side_row, 10 * table, buckets, seed=7)
        facts.append(IndexFacts.of(view, table, sum(earlier.shape[0] for earlier in slots), len(of_table), rows))
        slots.append(of_table)
        side_rows.append(side_row)
        some = torch.cat([indexed, extremes, torch.arange(30), torch.randint(-(2**62), 0, (300,), generator=draw)])
        ids.append(some[torch.randperm(some.numel(), generator=draw)][:count])
    facts.append(IndexFacts.without_index())
    side_rows.append(torch.full((1,), -1))
    ids.append(torch.arange(count))
    ends = torch.tensor([of_table.numel() for of_table in ids]).cumsum(0)
    indexes = ReadIndexes(torch.cat(slots), torch.cat(side_rows), torch.tensor(facts))
    return (torch.cat(ids), ends, *indexes)


def bags(quick: bool) -> Iterator[Shape]:
    """Lengths and offsets of two keys, with ids that are rows of the first key's table, and one that is not."""
    for batch_size in (1, 9) if quick else (1, 9, 300):
        lengths = torch.arange(2 * batch_size) % 4
        for are_offsets, wrong in ((False, False), (True, False), (False, True)):
            ids = torch.arange(int(lengths.sum())) % 7
            if wrong and ids.numel() > 0:
                ids[0] = 7
            given = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) if are_offsets else lengths
            what = "offsets" if are_offsets else "lengths, an id out of range" if wrong else "lengths"
            yield Shape(f"batch {batch_size}, {what}", (ids, given, are_offsets, [batch_size] * 2, [7, -1]))


def selections(quick: bool) -> Iterator[Shape]:
    """The keys of a batch in another order, some of them twice, with weights and without."""
    for batch_size in (1, 7) if quick else (1, 7, 300):
        draw = torch.Generator().manual_seed(batch_size)
        lengths = torch.randint(0, 4, (4, batch_size), generator=draw)
        ids = torch.randint(-(2**62), 2**62, (int(lengths.sum()),), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        positions = [2, 0, 2, 3]
        count = int(lengths[positions].sum())
        for weights in (None, torch.rand(ids.numel(), generator=draw)):
            text = f"batch {batch_size}{'' if weights is None else ', weighted'}"
            yield Shape(text, (ids, offsets, positions, batch_size, count, weights))


def routed(quick: bool) -> Iterator[Shape]:
    """A table that is not cut, one whose ids are rows, and one with an index; with weights and without."""
    routes = Routes(
        [[], [0, 4, 4, 10], [0, 7, 20]], [0, 0, 2], [0, 10, 20], [0, 0, 3], [0, 0, -(2**63)],
        [1, 0, 1, 1, 2, 2, 2], [0, WHOLE, 1, 2, 0, 1, WHOLE],
    )  # fmt: skip
    borders = list(chain.from_iterable(routes.row_borders))
    lists = (borders, list(map(len, routes.row_borders)), *routes[1:])
    for batch_size in (1, 5) if quick else (1, 5, 40):
        draw = torch.Generator().manual_seed(batch_size)
        lengths = torch.randint(0, 4, (3 * batch_size,), generator=draw)
        ends = list(accumulate(lengths.view(3, batch_size).sum(1).tolist(), initial=0))
        ids = torch.randint(-(2**63), 2**63 - 1, (ends[-1],), generator=draw)
        ids[ends[1] : ends[2]] = torch.randint(0, 10, (ends[2] - ends[1],), generator=draw)
        for weights in (None, torch.rand(ids.numel(), generator=draw)):
            text = f"batch {batch_size}{'' if weights is None else ', weighted'}"
            yield Shape(text, (ids, lengths, batch_size, *lists, weights))


def new_rows(quick: bool) -> Iterator[Shape]:
    """New rows of one and of three tables, with two states, one and none."""
    sizes = (([3], torch.float32), ([64, 5, 130], torch.float32), ([64, 8, 1000], torch.float16))
    for dims, dtype in sizes[: 2 if quick else None]:
        draw = torch.Generator().manual_seed(len(dims))
        weights = [torch.zeros(9, dim, dtype=dtype) for dim in dims]
        first = [torch.full((9, 0 if table == 2 else dim), 7.0) for table, dim in enumerate(dims)]
        second = [torch.full((9, 1 if table == 0 else 0), 7.0) for table, _ in enumerate(dims)]
        ids = torch.randint(-(2**63), 2**63 - 1, (5 * len(dims),), generator=draw)
        rows = torch.cat([torch.randperm(9, generator=draw)[:5] for _ in dims])
        entries = torch.stack([rows, ids, torch.arange(len(dims)).repeat_interleave(5)], 1)
        keys = [initialization_key(f"t{table}", 3) for table, _ in enumerate(dims)]
        ends = ([-0.5] * len(dims), [0.25] * len(dims), [0.5] * len(dims), [0.0] * len(dims))
        text = f"dims {', '.join(map(str, dims))}, {str(dtype).removeprefix('torch.')}"
        yield Shape(text, (entries, weights, first, second, keys, list(range(len(dims))), *ends))
