"""Loads a checkpoint into sharded tables: each rank checks and reads its own rows and columns.

If a table has more rows than it was saved with, every rank reads its whole index, because ids move. No rank ever holds
whole weights or optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from recfx.checkpoint import storage
from recfx.checkpoint.contents import IN_BACKWARD, MODEL, mismatch
from recfx.checkpoint.in_backward import BackwardOptimizer, BackwardPlan
from recfx.checkpoint.saved_folder import SavedFolder
from recfx.checkpoint.storage import Parts
from recfx.checkpoint.table_names import NamedTable, check_index_sizes, sharded_tables
from recfx.collections.fit_table import check_weight, saved_shape
from recfx.collections.sharding.load_state import fit_slices, fit_whole_index
from recfx.collections.sharding.state import whole_index
from recfx.hashing.identity import IDENTITY, check_identity
from recfx.hashing.row_move import RowMove, row_aligned_names
from recfx.hashing.slices import COUNTS, SLICE_COUNTS, STATISTICS, part_count, parts_between, slice_state
from recfx.ir.shard import Shard
from recfx.optim.rules.rule import STEP, StateTensor

IN_PLACE_BYTES = 1 << 20  # smaller tensors are read into separate memory, so nothing is lost if reading fails


@dataclass
class TablePlan:
    """What is to be done to this rank's shards of one table.

    Args:
        table: the table and its collection.
        saved: shape and dtype of the saved weight.
        move: where the rows go, if the table has more rows than saved.
        indexes: state of the shards' indexes, by shard name.
        aside: weights of small shards that were already read, by shard name.
    """

    table: NamedTable
    saved: Tensor
    move: RowMove | None = None
    indexes: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    aside: dict[str, Tensor] = field(default_factory=dict)

    def expect_load(self) -> None:
        """Note that from here on weights and indexes may belong to different states."""
        for name in self.indexes:
            self.table.module.index(name).expect_load()

    def carry_out(self, folder: SavedFolder) -> None:
        """Load. Everything has been checked; what can still fail is the disk."""
        module = self.table.module
        for shard in self.table.local():
            weight = module.weight(shard.name).detach()
            if shard.name in self.aside:
                weight.copy_(self.aside[shard.name])
            else:
                self.read(shard, weight, folder)
        for name, state in self.indexes.items():
            module.index(name).load_state_dict(state)
        if self.move is not None:
            module.note_row_moves({self.table.name: self.move}, keep=True)

    def read(self, shard: Shard, weight: Tensor, folder: SavedFolder) -> None:
        """Load the shard's weight; rows for which nothing was saved stay as they are."""
        read_rows(folder, MODEL + self.table.weight, self.saved, shard, self.move, weight, shard.columns[0])


def plan_tables(model: nn.Module, folder: SavedFolder, saved: Mapping[str, Tensor]) -> list[TablePlan]:
    """Check the saved state of sharded tables against this rank's shards. Changes nothing.

    Args:
        model: the model without wrappers.
        folder: the data folder.
        saved: shapes and dtypes, by name in the model; everything that the tables need is there.

    Raises:
        CheckpointError: ``checkpoint_mismatch``, or what is wrong with an index.
    """
    plans = []
    for table in sharded_tables(model):
        if table.first:
            plan = TablePlan(table, saved[table.weight])
            if table.table.table.has_index:
                _plan_index(plan, folder, saved)
            _check_weight(plan)
            _read_small(plan, folder)
            plans.append(plan)
    return plans


def _check_weight(plan: TablePlan) -> None:
    spec, dtype = plan.table.table.table, plan.table.module.dtypes[plan.table.name]
    wanted = saved_shape(spec.num_embeddings, spec.embedding_dim, plan.move)
    if tuple(plan.saved.shape) != wanted or plan.saved.dtype != dtype:
        raise mismatch(
            f"{plan.table.weight} was saved as {plan.saved.dtype} {tuple(plan.saved.shape)}, but is {dtype} "
            f"{(spec.num_embeddings, spec.embedding_dim)} here.",
            what_to_do="build the model as it was built when saving.",
        )


def _read_small(plan: TablePlan, folder: SavedFolder) -> None:
    for shard in plan.table.local():
        weight = plan.table.module.weight(shard.name).detach()
        if weight.numel() * weight.element_size() < IN_PLACE_BYTES:
            plan.aside[shard.name] = weight.clone()
            plan.read(shard, plan.aside[shard.name], folder)


def _plan_index(plan: TablePlan, folder: SavedFolder, saved: Mapping[str, Tensor]) -> None:
    table = plan.table
    spec, whole = table.table.table, whole_index(table.table.table)
    keys = {name: key for name, key in table.index_keys().items() if key in saved}
    check_index_sizes(saved, keys.values(), spec.num_embeddings, spec.name)
    check_weight(spec.name, saved.get(keys.get("row_ids", "")), plan.saved, spec.embedding_dim)
    aligned = [name for name in row_aligned_names(whole) if name in keys]
    assert spec.hashing is not None
    sizes: dict[str, tuple[int, ...]] = dict.fromkeys(aligned, (spec.num_embeddings,))
    if SLICE_COUNTS in keys:
        sizes[SLICE_COUNTS] = (part_count(spec.hashing), len(STATISTICS))
    if any(saved[keys[name]].shape != size for name, size in sizes.items()):
        read = storage.read(folder, {MODEL + key: saved[key] for key in keys.values()})
        found = {name: read[MODEL + key] for name, key in keys.items()}
        pieces, plan.move = fit_whole_index(table.module, table.table, found, plan.saved)
        plan.indexes = {shard.name: piece for shard, piece in pieces.items()}
        return
    common = storage.read(
        folder, {MODEL + keys[name]: saved[keys[name]] for name in (COUNTS, IDENTITY) if name in keys}
    )
    few = {name: common[MODEL + keys[name]] for name in (COUNTS, IDENTITY) if name in keys}
    check_identity(spec.hashing, spec.name, few.get(IDENTITY))
    slices: dict[tuple[int, int], dict[str, Tensor]] = {}
    for shard in table.local():
        if shard.rows not in slices:
            slices[shard.rows] = slice_state(spec.hashing, few, *shard.rows)
            for name in sizes:
                described = saved[keys[name]]
                here = parts_between(spec.hashing, *shard.rows) if name == SLICE_COUNTS else range(*shard.rows)
                target = torch.empty(len(here), *described.shape[1:], dtype=described.dtype, device="cpu")
                offsets = (here.start, *(0 for _ in described.shape[1:]))
                storage.read_into(folder, {MODEL + keys[name]: Parts(tuple(described.shape)).put(offsets, target)})
                slices[shard.rows][name] = target
    plan.indexes = {shard.name: piece for shard, piece in fit_slices(table.module, table.table, slices).items()}


class ShardedBackwardPlan(BackwardPlan):
    """What is to be done to the fused optimizer of one sharded table."""

    table: NamedTable

    @classmethod
    def of(
        cls, table: NamedTable, saved: Mapping[str, object], tensors: dict[str, Tensor], move: RowMove | None
    ) -> ShardedBackwardPlan:
        """The plan; ``table`` has a fused optimizer."""
        plan = cls(describe_table(table), saved, tensors, move)
        plan.table = table
        return plan

    def prepare(self) -> None:
        """Allocate the state of the shards' optimizers, before anything is changed."""
        store = self.table.module.store
        for shard in self.table.local():
            store.optimizers[shard.name].prepare(store.weight(shard.name))

    def carry_out(self, folder: SavedFolder) -> None:
        """Load."""
        store = self.table.module.store
        for shard in self.table.local():
            fused = store.optimizers[shard.name]
            for state in fused.rule.states:
                target = fused.state[state.name].detach()
                if self.move is not None or state.name not in self.tensors:
                    target.fill_(fused.start(state.name))
                if state.name in self.tensors:
                    self._read_state(folder, state, shard, target)
            if fused.rule.counts_steps:
                fused.state[STEP].fill_(self._step(folder))
        self.load_settings()

    def _step(self, folder: SavedFolder) -> float:
        if STEP in self.tensors:
            name = f"{IN_BACKWARD}{self.optimizer.name}.{STEP}"
            return float(storage.read(folder, {name: self.tensors[STEP]})[name])
        return float(self.saved["values"].get(STEP) or 0.0)

    def _read_state(self, folder: SavedFolder, state: StateTensor, shard: Shard, target: Tensor) -> None:
        name, described = f"{IN_BACKWARD}{self.optimizer.name}.{state.name}", self.tensors[state.name]
        if not state.per_row:
            return read_rows(folder, name, described, shard, self.move, target, shard.columns[0])
        dim = self.table.table.table.embedding_dim
        blocks = [tuple(block) for block in self.saved.get("blocks") or [(0, dim)]]
        rows = described.shape[0] // len(blocks)
        if shard.columns in blocks:
            begin = blocks.index(shard.columns) * rows
            return read_rows(folder, name, described, shard, self.move, target, 0, begin)
        if len(blocks) == 1:
            return read_rows(folder, name, described, shard, self.move, target, 0)
        mean, part = torch.zeros_like(target), torch.empty_like(target)
        for number, (left, right) in enumerate(blocks):
            part.copy_(target)  # keeps rows for which nothing was saved
            read_rows(folder, name, described, shard, self.move, part, 0, number * rows)
            mean += part * ((right - left) / dim)
        target.copy_(mean)
        return None


def describe_table(table: NamedTable) -> BackwardOptimizer:
    """The fused optimizer of a sharded table as that of the whole table, without its state, which is elsewhere."""
    fused, spec = table.module.fused[table.name], table.table.table
    weight = nn.Parameter(torch.empty(spec.num_embeddings, spec.embedding_dim, device="meta"))
    return BackwardOptimizer(table.weight, fused.rule, weight, fused.group, {}, fused)


def read_rows(
    folder: SavedFolder,
    name: str,
    described: Tensor,
    shard: Shard,
    move: RowMove | None,
    target: Tensor,
    column: int,
    row: int = 0,
) -> None:
    """Read the rows of one shard into ``target``, and as many columns as ``target`` has.

    Args:
        folder: the data folder.
        name: name of the saved tensor.
        described: its shape and dtype.
        shard: the shard whose rows are read.
        move: where rows are now; None if they are where they were.
        target: the tensor to read into; rows for which nothing was saved stay as they are.
        column: the first column that is read.
        row: the position of the table's row 0.
    """
    first, end = shard.rows
    if move is None:
        storage.read_into(folder, {name: Parts(tuple(described.shape)).put((row + first, column), target)})
        return
    here = move.within(first, end)
    if here.old_rows.numel() == 0:
        return
    begin = int(here.old_rows.min())  # a shard's buckets are adjacent, so this reads few rows of other shards
    part = torch.empty(int(here.old_rows.max()) + 1 - begin, target.shape[1], dtype=described.dtype, device="cpu")
    storage.read_into(folder, {name: Parts(tuple(described.shape)).put((row + begin, column), part)})
    RowMove(part.shape[0], here.old_rows - begin, here.new_rows).apply(part, target)
