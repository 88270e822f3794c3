"""Giving rows to new ids of a training batch where the ids are, in indexes that are on their device.

``recfx::insert_rows_`` runs by the kernels in ``insert_rows_triton.py``; ``insert_rows_reference.py`` defines it. Both
decide as ``hash_index.find_or_insert`` does, for indexes of whole tables that neither evict nor count candidates.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import launch
from recfx.kernels.index.device_indexes import DeviceIndexes, InsertFacts
from recfx.kernels.index.index_buffers import BATCHES, IDS_SEEN, INSERTED, SHARED_ANSWERS

_LINE = 8  # int64 values of one cache line, into which one program writes


class InsertedRows(NamedTuple):
    """What ``insert_rows_`` returns."""

    rows: Tensor  # int64 [n]
    new_rows: Tensor  # int64: the rows that were given out, table by table, in the order in which they were given out
    states_before: Tensor  # uint8, one per new row
    report: Tensor  # int64 [tables, 2]: the rows that each table gave out, and which of its buckets is full (-1: none)


def insert_rows(ids: Tensor, table_ends: Tensor, indexes: DeviceIndexes) -> InsertedRows:
    """Take all tables through one training batch, or none: the decisions are those of ``hash_index.find_or_insert``.

    New ids get the lowest free row of their bucket in the order of their first appearance; in a full bucket, they share
    a row, or the batch is refused. In which slot of the groups an id is may differ; that it is found there may not.

    The host waits for the device: once if every id has a row, three times otherwise. With new ids, ATen sorts them five
    times, and one program per table writes them into slots.

    Args:
        ids: int64 ``[n]``, any values, ordered by table.
        table_ends: int64 ``[tables]``, where the ids of each table end; the last one is ``n``.
        indexes: on the device of the ids; changed in place.

    Returns:
        If a bucket is full whose table does not share rows: rows of -1, and no new rows; nothing has changed. Ids of a
        table without an index are rows already.
    """
    return InsertedRows(*insert_rows_(ids, table_ends, *indexes))


@torch.library.custom_op(
    "recfx::insert_rows_",
    mutates_args=("slot_groups", "side_rows", "row_ids", "row_states", "bucket_taken", "next_free", "counts"),
)
def insert_rows_(
    ids: Tensor,
    table_ends: Tensor,
    slot_groups: Tensor,
    side_rows: Tensor,
    row_ids: Tensor,
    row_states: Tensor,
    bucket_taken: Tensor,
    next_free: Tensor,
    counts: Tensor,
    facts: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``insert_rows``; the arguments are contiguous."""
    indexes = DeviceIndexes(slot_groups, side_rows, row_ids, row_states, bucket_taken, next_free, counts, facts)
    batch = _Batch(ids, table_ends, indexes)
    found = batch.find()
    if isinstance(given := batch.give(found), Tensor):
        nothing = ids.new_empty(0)
        return found.rows.fill_(-1), nothing, nothing.to(torch.uint8), given
    has_index = (facts[:, InsertFacts._fields.index("slots")] > 0).to(torch.int64)
    seen = torch.diff(table_ends, prepend=table_ends.new_zeros(1)) * has_index
    for counter, amount in (
        (BATCHES, has_index), (IDS_SEEN, seen), (INSERTED, given.inserted), (SHARED_ANSWERS, given.shared),
    ):  # fmt: skip
        counts[:, counter] += amount
    report = torch.stack([given.inserted, torch.full_like(given.inserted, -1)], dim=1)
    return found.rows, given.new_rows, given.states_before, report


class _Found(NamedTuple):
    """The rows of the ids that have one, and where those are that have none."""

    rows: Tensor  # int64 [n], -1 for absent ids
    absent: Tensor  # int32 [programs, tables], on the CPU: how many there are
    ids_per_program: int


class _Given(NamedTuple):
    """What a batch gave to absent ids."""

    new_rows: Tensor
    states_before: Tensor
    inserted: Tensor  # int64 [tables], how many ids got a row
    shared: Tensor  # int64 [tables], how often ids share one


class _Batch:
    """One batch on its way through the kernels."""

    def __init__(self, ids: Tensor, table_ends: Tensor, indexes: DeviceIndexes) -> None:
        from recfx.kernels.index import insert_rows_triton

        self.kernels: Any = insert_rows_triton
        self.ids, self.table_ends, self.indexes = ids, table_ends, indexes

    def find(self) -> _Found:
        """Find the rows that ids have; waits for the device."""
        ids, indexes, tables = self.ids, self.indexes, self.table_ends.numel()
        lines = -(-ids.numel() // _LINE)
        programs = launch.programs(ids.device, lines)
        found = torch.empty_like(ids)
        absent = torch.zeros(programs, tables, dtype=torch.int32, device=ids.device)
        each = -(-lines // programs) * _LINE
        if ids.numel() > 0:
            launch.launch(
                self.kernels.recfx_find_in_groups, programs, ids, self.table_ends, indexes.slot_groups,
                indexes.side_rows, indexes.facts, found, absent, ids.numel(), tables, each,
            )  # fmt: skip
        return _Found(found, absent.cpu(), each)

    def give(self, found: _Found) -> _Given | Tensor:
        """Give rows to absent ids, and complete ``found.rows``; or the report, if a table is full."""
        ids, indexes = self.ids, self.indexes
        per_table = found.absent.sum(0).tolist()
        count, num_buckets = sum(per_table), indexes.bucket_taken.numel()
        if count == 0:
            nothing, none = ids.new_empty(0), torch.zeros_like(self.table_ends)
            return _Given(nothing, nothing.to(torch.uint8), none, none)
        programs = launch.programs(ids.device, count)
        share = (count, num_buckets, -(-count // programs))
        positions, digits, buckets = self._collect(found, count)
        by_hash, tables = _in_order(digits), digits[3]
        new_buckets = torch.empty_like(buckets)
        launch.launch(
            self.kernels.recfx_first_sightings, programs, ids, positions, tables, buckets, by_hash, new_buckets, *share
        )
        by_bucket = _in_order(new_buckets.unsqueeze(0))
        answers = ids.new_full((count,), -1)
        launch.launch(
            self.kernels.recfx_plan_rows, programs, ids, positions, tables, new_buckets, by_bucket, indexes.facts,
            indexes.side_rows, indexes.row_ids, indexes.next_free, answers, *share,
        )  # fmt: skip
        is_full = (answers == -1) & (new_buckets < num_buckets)
        if bool(is_full.any()):
            return _refused(is_full, tables, new_buckets, answers, indexes.facts).to(ids.device)
        states = torch.zeros(count, dtype=torch.int8, device=ids.device)
        launch.launch(
            self.kernels.recfx_take_rows, programs, ids, positions, tables, new_buckets, by_bucket, answers,
            indexes.facts, indexes.row_ids, indexes.row_states.view(torch.int8), indexes.bucket_taken,
            indexes.next_free, states, *share,
        )  # fmt: skip
        counted = self._place((positions, new_buckets, by_hash, answers), per_table, found.rows)
        is_given = answers >= 0
        return _Given(answers[is_given], states.view(torch.uint8)[is_given], *counted)

    def _collect(self, found: _Found, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """List the absent ids in order: their positions, the digits of their tables and hashes, and their buckets."""
        of_programs = found.absent.sum(1)
        firsts = (of_programs.cumsum(0) - of_programs).to(torch.int32).to(self.ids.device)
        lists = torch.empty(6, count, dtype=torch.int32, device=self.ids.device)
        positions, buckets, digits = lists[0], lists[1], lists[2:]
        launch.launch(
            self.kernels.recfx_collect_absent, of_programs.numel(), self.ids, self.table_ends, self.indexes.facts,
            found.rows, firsts, positions, digits, buckets, self.ids.numel(), count, found.ids_per_program,
        )  # fmt: skip
        return positions, digits, buckets

    def _place(
        self, absent: tuple[Tensor, Tensor, Tensor, Tensor], per_table: list[int], rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write new ids into slots, and the answers of all absent ones into ``rows``."""
        indexes, tables = self.indexes, len(per_table)
        ends = torch.tensor(list(accumulate(per_table))).to(rows.device)
        begins = torch.tensor([0, *accumulate(per_table)][:-1]).to(rows.device)
        first, second = torch.zeros(2, 3, tables, dtype=torch.int64, device=rows.device)
        for again, from_, counted in ((0, begins, first), (1, first[0], second)):
            launch.launch(
                self.kernels.recfx_place_ids, launch.programs(rows.device, tables), self.ids, *absent, indexes.facts,
                from_, ends, indexes.slot_groups, indexes.side_rows, rows, *counted, tables,
                indexes.bucket_taken.numel(), again,
            )  # fmt: skip
        _, inserted, shared = first
        return inserted, shared


def _in_order(digits: Tensor) -> Tensor:
    """The numbers 0, 1, ... in the order of their digits, int32 ``[digits, n]``, the lowest first; equals by number.

    Keys are float32, which are sorted by vector cores of Ascend; integers are not.
    """
    order: Tensor | None = None
    for digit in digits.to(torch.float32):
        keys = digit if order is None else digit[order]
        sorted_ = torch.sort(keys, stable=True).indices
        order = sorted_ if order is None else order[sorted_]
    assert order is not None
    return order


def _refused(is_full: Tensor, tables: Tensor, new_buckets: Tensor, answers: Tensor, facts: Tensor) -> Tensor:
    """The report of a batch that finds a bucket full: of each table, what it would have given out until then."""
    full, of_absent, buckets, given = (each.cpu() for each in (is_full, tables, new_buckets, answers >= 0))
    report = []
    for table, fields in enumerate(facts.tolist()):
        mine = of_absent == table
        first = torch.nonzero(mine & full).flatten()[:1].tolist()
        until = first[0] if first else full.numel()
        bucket = int(buckets[until]) - InsertFacts(*fields).buckets_start if first else -1
        report.append([int((mine & given)[:until].sum()), bucket])
    return torch.tensor(report)


@insert_rows_.register_fake
def _fake(ids: Tensor, table_ends: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    states = torch.empty(count, dtype=torch.uint8, device=ids.device)
    return torch.empty_like(ids), ids.new_empty(count), states, ids.new_empty(table_ends.numel(), 2)
