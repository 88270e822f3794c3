"""Batches of ids to insert: repeated ids, freed rows, id -1, full tables, and groups that overflow at the end.

Whatever the kernels hand to each other is computed here by simpler means.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recfx.kernels.index import hash_index_reference as host
from recfx.kernels.index.buckets import bucket_of, shared_rows
from recfx.kernels.index.device_indexes import DeviceIndexes
from recfx.kernels.index.free_rows import update_free_rows
from recfx.kernels.index.index_buffers import IndexBuffers, IndexPolicy, allocate_buffers
from recfx.kernels.index.insert_rows_reference import insert_rows_reference
from recfx.kernels.index.slot_groups import SLOTS, find_in_groups, group_count, home_groups, seeded_hash

_SEED = 77
_EXTREMES = (-1, 2**63 - 1, -(2**63), 2**32, -(2**31))


@dataclass(frozen=True)
class _Table:
    rows: int
    dense_rows: int = 0
    buckets: int = 1
    on_full: int = 0
    seed: int = 0
    mark_new: int = 0
    held: int = 0  # ids that have rows
    erased: int = 0  # of these, ids that have lost them again
    in_last_group: bool = False  # the home of all of its ids


_TABLES: tuple[_Table | None, ...] = (
    _Table(60, buckets=3, held=30, erased=9, mark_new=1),
    None,
    _Table(22, dense_rows=5, buckets=4, on_full=1, seed=-3, held=9),
    _Table(12, on_full=1, in_last_group=True, held=6),
    _Table(150, dense_rows=1, buckets=2),
)


@dataclass(frozen=True)
class Batch:
    """What each kernel of one batch is given, and what it has to make of it, by simpler means."""

    ids: Tensor
    ends: Tensor
    tables: tuple[_Table | None, ...]
    indexes: DeviceIndexes

    @cached_property
    def table_of(self) -> list[int]:
        begins = [0, *self.ends.tolist()]
        return [table for table in range(len(self.tables)) for _ in range(begins[table + 1] - begins[table])]

    @cached_property
    def found(self) -> Tensor:
        rows = self.ids.clone()
        for table, each in enumerate(self.tables):
            mine = torch.tensor(self.table_of) == table
            if each is not None:
                mine &= (self.ids < 0) | (self.ids >= each.dense_rows)
                groups = self.groups(self.indexes.slot_groups, table)
                side_row = torch.tensor([int(self.indexes.side_rows[table]), _SEED])
                rows[mine] = find_in_groups(self.ids[mine], groups, side_row)
        return rows

    def groups(self, slot_groups: Tensor, table: int) -> Tensor:
        counts = [0 if each is None else group_count(each.rows - each.dense_rows) for each in self.tables]
        return slot_groups.split(counts)[table]

    @cached_property
    def absent(self) -> list[int]:
        """Positions."""
        has_index = [self.tables[table] is not None for table in self.table_of]
        return [position for position, row in enumerate(self.found.tolist()) if row == -1 and has_index[position]]

    def of_absent(self, values: list[Any]) -> list[Any]:
        return [values[position] for position in self.absent]

    @cached_property
    def hashes(self) -> list[int]:
        """Of absent ids, without a sign."""
        return [each % 2**64 for each in seeded_hash(self.ids[self.absent], torch.tensor([_SEED])).tolist()]

    @cached_property
    def buckets(self) -> list[int]:
        starts = list(accumulate([0 if each is None else each.buckets for each in self.tables], initial=0))
        buckets = []
        for position, table in zip(self.absent, self.of_absent(self.table_of), strict=True):
            policy = self.tables[table]
            assert policy is not None
            bucket = bucket_of(self.ids[position : position + 1], policy.buckets, policy.seed)
            buckets.append(starts[table] + int(bucket))
        return buckets

    @cached_property
    def by_hash(self) -> list[int]:
        keys = list(zip(self.of_absent(self.table_of), self.hashes, self.absent, strict=True))
        return sorted(range(len(keys)), key=keys.__getitem__)

    @cached_property
    def num_buckets(self) -> int:
        return self.indexes.bucket_taken.numel()

    @cached_property
    def new_buckets(self) -> list[int]:
        seen, buckets = set(), []
        for position, bucket in zip(self.absent, self.buckets, strict=True):
            key = (self.table_of[position], int(self.ids[position]))
            buckets.append(self.num_buckets if key in seen else bucket)
            seen.add(key)
        return buckets

    @cached_property
    def by_bucket(self) -> list[int]:
        return sorted(range(len(self.absent)), key=self.new_buckets.__getitem__)

    @cached_property
    def answers(self) -> list[int]:
        starts = list(accumulate([0 if each is None else each.rows for each in self.tables], initial=0))
        taken = [set[int]() for _ in self.tables]
        answers = []
        for position, bucket in zip(self.absent, self.new_buckets, strict=True):
            number = self.table_of[position]
            table = self.tables[number]
            if bucket == self.num_buckets or table is None:
                answers.append(-1)
                continue
            first = sum(0 if each is None else each.buckets for each in self.tables[:number])
            policy = _policy(table)
            taken[number].add(int(self.indexes.side_rows[number]))
            free = [
                row
                for row in policy.rows_of(bucket - first)
                if int(self.indexes.row_ids[starts[number] + row]) == -1 and row not in taken[number]
            ]
            if free:
                taken[number].add(free[0])
                answers.append(free[0])
                continue
            place = table.rows, table.dense_rows, table.buckets, table.seed
            answers.append(-int(shared_rows(self.ids[position : position + 1], *place)) - 2 if table.on_full else -1)
        return answers

    @cached_property
    def after(self) -> tuple[DeviceIndexes, Tensor]:
        """The indexes, and the rows of all ids."""
        indexes = DeviceIndexes(*(tensor.clone() for tensor in self.indexes))
        return indexes, insert_rows_reference(self.ids, self.ends, indexes).rows

    @cached_property
    def ends_of_absent(self) -> Tensor:
        tables = torch.tensor(self.of_absent(self.table_of), dtype=torch.int64)
        return torch.bincount(tables, minlength=len(self.tables)).cumsum(0)

    @cached_property
    def wrapped(self) -> tuple[Tensor, Tensor]:
        """The slots without the ids that began again at a table's first slot; and the first of these per table."""
        slots, (after, _) = self.indexes.slot_groups.clone(), self.after
        left = self.ends_of_absent.clone()
        for table, each in enumerate(self.tables):
            if each is None:
                continue
            before, now = self.groups(slots, table), self.groups(after.slot_groups, table)
            for group, slot in torch.nonzero(now[:, :SLOTS] != before[:, :SLOTS]).tolist():
                home = int(home_groups(now[group, slot : slot + 1], now.shape[0], torch.tensor([-1, _SEED])))
                if home <= group:
                    before[group, [slot, slot + SLOTS]] = now[group, [slot, slot + SLOTS]]
                    continue
                (first,) = [
                    k
                    for k, number in enumerate(self.by_hash)
                    if self.table_of[self.absent[number]] == table
                    and int(self.ids[self.absent[number]]) == int(now[group, slot])
                    and self.new_buckets[number] < self.num_buckets
                ]
                left[table] = min(int(left[table]), first)
        return slots, left


def _policy(table: _Table) -> IndexPolicy:
    seed, on_full, buckets, rows = table.seed, table.on_full, table.buckets, table.rows
    return IndexPolicy(table.dense_rows, seed, on_full, 0, 1, 0, rows, buckets, 0, rows, table.mark_new)


def _draw(count: int, table: _Table, generator: torch.Generator) -> Tensor:
    ids = torch.cat([torch.tensor(_EXTREMES), torch.randint(-(2**62), 2**62, (3000,), generator=generator)])
    if table.in_last_group:
        groups = group_count(table.rows - table.dense_rows)
        ids = ids[home_groups(ids, groups, torch.tensor([-1, _SEED])) == groups - 1]
    return ids[:count]


def _filled(table: _Table, ids: Tensor) -> tuple[IndexBuffers, IndexPolicy]:
    """An index in which the first of ``ids`` have rows."""
    policy = _policy(table)
    buffers = allocate_buffers(policy, "cpu")
    for name, tensor in buffers._asdict().items():
        tensor.fill_(-1 if name in ("slot_groups", "side_row", "row_ids") else 0)
    buffers.side_row[1] = _SEED
    update_free_rows(buffers.free_rows, buffers.row_state, torch.arange(table.rows), table.dense_rows)
    held = ids[: table.held]
    host.find_or_insert(held, [0], [held.numel()], [*buffers], [*policy], [2**62])
    if table.erased:
        host.erase(held[: table.erased], [*buffers], [*policy])
    return buffers, policy


def _batch(most: int, tables: tuple[_Table | None, ...]) -> Batch:
    """Up to ``most`` ids of each table; dense ones, and the first that is not, are among many."""
    generator = torch.Generator().manual_seed(most)
    held, asked = [], []
    for table in tables:
        if table is None:
            held.append(None)
            asked.append(torch.arange(-1, 4)[:most])
            continue
        ids = _draw(40, table, generator)
        held.append(_filled(table, ids))
        dense = torch.arange(table.dense_rows + 1)
        some = torch.cat([dense, ids, ids[torch.randint(0, ids.numel(), (30,), generator=generator)]])
        asked.append(some[torch.randperm(some.numel(), generator=generator)][:most])
    ends = torch.tensor(list(accumulate(each.numel() for each in asked)))
    return Batch(torch.cat(asked), ends, tables, DeviceIndexes.of(held, "cpu"))


def _one_id(tables: tuple[_Table, ...]) -> Batch:
    """The same in every table."""
    indexes = [_filled(table, torch.tensor([7])) for table in tables]
    ends = torch.arange(1, len(tables) + 1)
    return Batch(torch.full_like(ends, 5), ends, tables, DeviceIndexes.of(indexes, "cpu"))


FULL = "a table is full"
BATCHES = {
    "many ids": partial(_batch, 100, _TABLES),
    "few ids": partial(_batch, 2, _TABLES),
    "the last group overflows": partial(_batch, 100, _TABLES[3:4]),
    "the last row is taken": partial(_batch, 100, _TABLES[2:3]),
    "one id": partial(_one_id, (_Table(3), _Table(3), _Table(3))),
    FULL: partial(_batch, 100, tuple(each and replace(each, on_full=0) for each in _TABLES)),
}
_MADE: dict[str, Batch] = {}


def made(label: str) -> Batch:
    if label not in _MADE:
        _MADE[label] = BATCHES[label]()
    return _MADE[label]
