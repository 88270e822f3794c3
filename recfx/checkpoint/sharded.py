"""The sharded tables of a checkpoint: each rank saves, checks and loads its own rows and columns.

They are saved as parts of whole tensors, under the names of an unsharded model. If a table has more rows than it was
saved with, every rank reads its whole index, because ids move. No rank ever holds whole weights or optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recfx.checkpoint.contents import IN_BACKWARD, MODEL, check_saved_as
from recfx.checkpoint.storage import Parts, SavedFolder
from recfx.checkpoint.table_names import NamedTable, check_index_sizes, sharded_tables
from recfx.collections.fit_table import check_weight, saved_shape
from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.sharding.load_state import fit_slices, fit_whole_index
from recfx.collections.sharding.state import whole_index
from recfx.hashing.identity import IDENTITY, check_identity, identity
from recfx.hashing.index import HashIndex
from recfx.hashing.row_move import RowMove, row_aligned_names
from recfx.hashing.slices import COUNTS, SLICE_COUNTS, STATISTICS, join_states, part_count, parts_between, slice_state
from recfx.ir.shard import Shard
from recfx.kernels.index.index_buffers import BATCHES
from recfx.optim.rules.rule import STEP


def tables_contents(model: nn.Module) -> tuple[dict[str, Tensor | Parts], dict[str, list[Tensor]]]:
    """This rank's parts of all sharded tables, and the ``counts`` of its slices, which have yet to be joined.

    Raises:
        CheckpointError: the state that was loaded in place into an index is not valid.
    """
    tensors: dict[str, Tensor | Parts] = {}
    counts: dict[str, list[Tensor]] = {}
    for module in sharded_collections(model).values():
        module.prepare_to_save()
    for table in sharded_tables(model):
        tensors[MODEL + table.weight] = _parts(
            table, (table.table.table.num_embeddings, table.table.table.embedding_dim), table.module.store.weight
        )
        if table.table.table.has_index:
            _index(table, tensors, counts)
        if table.first and table.name in table.module.fused:
            _optimizer(table, tensors)
    return tensors, counts


def joined_counts(ranks: Sequence[dict[str, list[Tensor]]]) -> dict[str, Tensor]:
    """The tables' ``counts``, joined from those of all ranks."""
    slices: dict[str, list[dict[str, Tensor]]] = {}
    for counts in ranks:
        for name, values in counts.items():
            slices.setdefault(name, []).extend({COUNTS: value} for value in values)
    return {name: join_states(states)[COUNTS] for name, states in slices.items()}


def _parts(table: NamedTable, size: tuple[int, ...], tensor_of: Any, blocks: Sequence[tuple[int, int]] = ()) -> Parts:
    """This rank's parts of a tensor cut like the weight or, with ``blocks``, of one with a number per row and block."""
    parts = Parts(size)
    for shard in table.own_saved_shards():
        row, column = shard.rows[0], shard.columns[0]
        if blocks:
            row, column = table.table.stacked_row(shard), 0
        parts.put((row, column), tensor_of(shard.name))
    return parts


def _index(table: NamedTable, tensors: dict[str, Tensor | Parts], counts: dict[str, list[Tensor]]) -> None:
    store, spec = table.module.store, table.table.table
    assert spec.hashing is not None
    for name, key in table.index_keys().items():
        slices = table.own_saved_slices()
        if name == IDENTITY:
            if table.is_first_shard_here():
                tensors[MODEL + key] = identity(spec.hashing, spec.name)
        elif name == COUNTS:
            counts[MODEL + key] = [_counts(store.index(shard.name)) for shard in slices]
        elif name == SLICE_COUNTS:
            parts = tensors[MODEL + key] = Parts((part_count(spec.hashing), len(STATISTICS)))
            for shard in slices:
                index = store.index(shard.name)
                own = index.slice_counts if index.policy.is_whole_table else index.counts_to_save().of_parts
                parts.put((parts_between(spec.hashing, *shard.rows).start, 0), own)
        else:
            parts = tensors[MODEL + key] = Parts((spec.num_embeddings,))
            for shard in slices:
                parts.put((shard.rows[0],), getattr(store.index(shard.name), name))


def _counts(index: HashIndex) -> Tensor:
    """What an index says about the whole table: a slice of it knows only the number of batches."""
    counts = index.counts.clone()
    if not index.policy.is_whole_table:
        counts[BATCHES + 1 :] = 0
    return counts


def _optimizer(table: NamedTable, tensors: dict[str, Tensor | Parts]) -> None:
    store, spec = table.module.store, table.table.table
    rule = table.module.fused[table.name].rule
    for declared in rule.states:

        def tensor_of(local: str, name: str = declared.name) -> Tensor:
            state: Tensor = store.optimizers[local].state[name]
            return state.view(state.shape[0], math.prod(state.shape[1:]))

        rows = spec.num_embeddings
        blocks = table.table.column_blocks if declared.per_row else ()
        size = (len(blocks) * rows, 1) if blocks else (rows, spec.embedding_dim)
        tensors[f"{IN_BACKWARD}{table.weight}.{declared.name}"] = _parts(table, size, tensor_of, blocks)
    if rule.counts_steps and table.is_first_shard_here():
        step = store.optimizers[table.table.saved[0].name].state[STEP]
        tensors[f"{IN_BACKWARD}{table.weight}.{STEP}"] = torch.as_tensor(step).detach().reshape(())


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
    shape = spec.num_embeddings, spec.embedding_dim
    check_saved_as(plan.table.weight, plan.saved, dtype, shape, saved_shape(*shape, plan.move))


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
        read = folder.read([MODEL + key for key in keys.values()])
        whole_state = {name: read[MODEL + key] for name, key in keys.items()}
        pieces, plan.move = fit_whole_index(table.module, table.table, whole_state, plan.saved)
        plan.indexes = {shard.name: piece for shard, piece in pieces.items()}
        return
    common = folder.read([MODEL + keys[name] for name in (COUNTS, IDENTITY) if name in keys])
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
                folder.read_into({MODEL + keys[name]: Parts(tuple(described.shape)).put(offsets, target)})
                slices[shard.rows][name] = target
    plan.indexes = {shard.name: piece for shard, piece in fit_slices(table.module, table.table, slices).items()}


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
        folder.read_into({name: Parts(tuple(described.shape)).put((row + first, column), target)})
        return
    here = move.within(first, end)
    if here.old_rows.numel() == 0:
        return
    begin = int(here.old_rows.min())  # a shard's buckets are adjacent, so this reads few rows of other shards
    part = torch.empty(int(here.old_rows.max()) + 1 - begin, target.shape[1], dtype=described.dtype, device="cpu")
    folder.read_into({name: Parts(tuple(described.shape)).put((row + begin, column), part)})
    RowMove(part.shape[0], here.old_rows - begin, here.new_rows).apply(part, target)
