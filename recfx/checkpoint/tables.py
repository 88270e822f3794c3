"""The tables of a model: each rank saves, checks and loads its own rows and columns of them.

They are saved as parts of whole tensors, under the names of an unsharded model. An unsharded table is one shard, which
every rank has and the first one saves. If a table has more rows than it was saved with, every rank reads its whole
index, because ids move. No rank ever holds whole weights or optimizer state of a table that was saved in shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from recfx.checkpoint.contents import OPTIMIZER, check_has_elements, check_saved_as
from recfx.checkpoint.storage import Parts, SavedFolder
from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import collections_by_prefix
from recfx.collections.fit_table import check_weight, saved_shape
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.load_state import fit_slices, fit_whole_index
from recfx.hashing.identity import IDENTITY, check_identity
from recfx.hashing.index import HashIndex
from recfx.hashing.row_move import RowMove
from recfx.hashing.slices import COUNTS, SLICE_COUNTS, STATISTICS, part_count, parts_between, slice_state
from recfx.hashing.state import NOT_BY_ROW, state_names
from recfx.ir.tables import Shard, TableSpec
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules.rule import STEP, Rule


@dataclass(frozen=True)
class Table:
    """One table of a converted collection under one name.

    Args:
        prefix: the prefix of its collection.
        module: its collection.
        spec: the whole table.
        shards: its shards on all ranks.
        saved: those that are saved: one copy of each number.
        rank: this rank, as shards count ranks.
        first: whether this is the first name of the collection.
    """

    prefix: str
    module: ShardedCollection | UnshardedCollection
    spec: TableSpec
    shards: tuple[Shard, ...]
    saved: tuple[Shard, ...]
    rank: int
    first: bool

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def weight(self) -> str:
        """Name of the weight in the model."""
        return self.prefix + kind_of(self.module).weight_name("", self.name)

    @property
    def here(self) -> list[Shard]:
        """The shards of this rank."""
        return [shard for shard in self.shards if shard.rank == self.rank]

    @property
    def saved_here(self) -> list[Shard]:
        """The shards of this rank that are saved."""
        return [shard for shard in self.saved if shard.rank == self.rank]

    @property
    def saves_common(self) -> bool:
        """Whether this rank saves what all shards have in common."""
        return self.saved[0].rank == self.rank

    @cached_property
    def column_blocks(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted({shard.columns for shard in self.shards}))

    @cached_property
    def index_keys(self) -> dict[str, str]:
        """Names of its index's state in the model, by buffer name; empty if it has no index."""
        names = state_names(self.spec.hashing) if self.spec.hashing is not None and self.spec.has_index else ()
        return {name: f"{self.prefix}hash_indexes.{self.name}.{name}" for name in names}

    @property
    def weights(self) -> list[Tensor]:
        """The weights of the shards of this rank."""
        return [self.module.store.weight(shard.name) for shard in self.here]

    @property
    def dtype(self) -> torch.dtype:
        module = self.module
        return module.dtypes[self.name] if isinstance(module, ShardedCollection) else module.weight(self.name).dtype

    @property
    def indexes(self) -> list[HashIndex]:
        """The indexes of the shards of this rank."""
        return [self.module.store.index(shard.name) for shard in self.here] if self.spec.has_index else []

    @property
    def fused(self) -> FusedOptimizer | None:
        """Rule and settings of its fused optimizer, if it has one; the state is that of ``fused_of``."""
        module: Any = self.module
        fused: dict[str, FusedOptimizer] = module.fused if module.is_sharded else module.fused_optimizers()
        return fused.get(self.name)

    def fused_of(self, shard: Shard) -> FusedOptimizer:
        return self.module.store.optimizers[shard.name]


def tables_of(model: nn.Module) -> list[Table]:
    """Every table of a converted collection under every name: a state has the keys of a shared module once per name."""
    tables: list[Table] = []
    seen: set[int] = set()
    kinds: tuple[type[Any], ...] = (UnshardedCollection, ShardedCollection)
    for kind in kinds:
        for prefix, module in collections_by_prefix(model, kind):
            for spec in module.tables:
                if isinstance(module, ShardedCollection):
                    sharded, rank = module.sharding.named(spec.name), module.sharding.rank
                    shards, saved = sharded.filled, sharded.saved
                else:
                    rows, dim = module.weight(spec.name).shape
                    shards, rank = (Shard(spec, 0, (0, rows), (0, dim), name=spec.name),), 0
                    saved = shards
                tables.append(Table(prefix, module, spec, shards, saved, rank, id(module) not in seen))
            seen.add(id(module))
    return tables


def sharded_parameters(model: nn.Module) -> dict[int, tuple[Table, Shard]]:
    """The shard that each parameter of this rank is, by the ``id`` of the parameter."""
    return {
        id(table.module.store.weight(shard.name)): (table, shard)
        for table in tables_of(model)
        if table.first and table.module.is_sharded
        for shard in table.here
    }


# Saving


def fused_states(model: nn.Module, is_first: bool) -> dict[str, Tensor | Parts]:
    """This rank's parts of the state of fused optimizers; collections save weights and indexes in their ``state_dict``.

    Args:
        model: the model without wrappers.
        is_first: whether this rank saves what is not sharded.
    """
    tensors: dict[str, Tensor | Parts] = {}
    for table in tables_of(model):
        if table.first and (table.module.is_sharded or is_first) and (fused := table.fused) is not None:
            _save_optimizer(table, fused.rule, tensors)
    return tensors


def _parts(table: Table, size: tuple[int, ...], tensor_of: Any, blocks: Sequence[tuple[int, int]] = ()) -> Parts:
    """This rank's parts of a tensor cut like the weight or, with ``blocks``, of one with a number per row and block."""
    parts = Parts(size)
    for shard in table.saved_here:
        row, column = shard.rows[0], shard.columns[0]
        if blocks:
            row, column = blocks.index(shard.columns) * table.spec.num_embeddings + row, 0
        parts.put((row, column), tensor_of(shard))
    return parts


def saved_state_names(table: Table, rule: Rule) -> list[str]:
    """The tensors of its fused optimizer that are saved: an unsharded one has none before its first step."""
    if table.module.is_sharded:
        return list(rule.tensor_names)
    return [name for name in rule.tensor_names if name in table.fused_of(table.shards[0]).state]


def _save_optimizer(table: Table, rule: Rule, tensors: dict[str, Tensor | Parts]) -> None:
    spec, start = table.spec, f"{OPTIMIZER}{table.weight}."
    names = saved_state_names(table, rule)
    for declared in rule.states if rule.states and rule.states[0].name in names else ():

        def tensor_of(shard: Shard, name: str = declared.name) -> Tensor:
            state: Tensor = table.fused_of(shard).state[name]
            return state.reshape(state.shape[0], math.prod(state.shape[1:]))

        rows, blocks = spec.num_embeddings, table.column_blocks if declared.per_row else ()
        size = (len(blocks) * rows, 1) if blocks else (rows, spec.embedding_dim)
        tensors[start + declared.name] = _parts(table, size, tensor_of, blocks)
    if STEP in names and table.saves_common:
        step = table.fused_of(table.saved[0]).state[STEP]
        tensors[start + STEP] = torch.as_tensor(step).detach().reshape(())


# Loading


@dataclass
class TablePlan:
    """What is to be done to this rank's shards of one table.

    Args:
        table: the table and its collection.
        name: the name of its weight in the folder.
        move: where the rows go, if the table has more rows than saved.
        indexes: state of the shards' indexes, by shard name.
    """

    table: Table
    name: str
    move: RowMove | None = None
    indexes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def expect_load(self) -> None:
        """Note that from here on weights and indexes may belong to different states."""
        for name in self.indexes:
            self.table.module.index(name).expect_load()

    def carry_out(self, folder: SavedFolder) -> None:
        """Load; rows for which nothing was saved stay. Everything has been checked; what can still fail is the disk."""
        module = self.table.module
        for shard in self.table.here:
            read_rows(folder, self.name, shard, self.move, module.store.weight(shard.name), shard.columns[0])
        for name, state in self.indexes.items():
            module.index(name).load_state_dict(state)
        if self.move is not None:
            module.note_row_moves({self.table.name: self.move}, keep=True)


def plan_tables(model: nn.Module, folder: SavedFolder, saved: Mapping[str, Tensor], start: str) -> list[TablePlan]:
    """Check the saved state of tables against this rank's shards. Changes nothing.

    Args:
        model: the model without wrappers.
        folder: the data folder.
        saved: shapes and dtypes, by name in the model; everything that the tables need is there.
        start: what the model's names begin with in the folder.

    Raises:
        CheckpointError: ``checkpoint_mismatch``, or what is wrong with an index.
    """
    plans = []
    for table in tables_of(model):
        if table.first:
            check_has_elements(table.weight, table.weights)
            plan = TablePlan(table, start + table.weight)
            if table.spec.has_index:
                _plan_index(plan, folder, saved, start)
            rows, dim = shape = table.spec.num_embeddings, table.spec.embedding_dim
            check_saved_as(table.weight, saved[table.weight], table.dtype, shape, saved_shape(rows, dim, plan.move))
            plans.append(plan)
    return plans


def _plan_index(plan: TablePlan, folder: SavedFolder, saved: Mapping[str, Tensor], start: str) -> None:
    table, module = plan.table, plan.table.module
    spec = table.spec
    assert spec.hashing is not None
    keys = {name: key for name, key in table.index_keys.items() if key in saved}
    weight = saved[table.weight]
    check_weight(spec.name, saved.get(keys.get("row_ids", "")), weight, spec.embedding_dim)

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        tensors = folder.read([start + keys[name] for name in names])
        return {name: tensors[start + keys[name]] for name in names}

    sizes: dict[str, tuple[int, ...]] = {name: (spec.num_embeddings,) for name in keys if name not in NOT_BY_ROW}
    if SLICE_COUNTS in keys:
        sizes[SLICE_COUNTS] = (part_count(spec.hashing), len(STATISTICS))
    if any(saved[keys[name]].shape != size for name, size in sizes.items()):
        pieces, plan.move = fit_whole_index(module, spec, table.here, read(list(keys)), weight)
    else:
        common = read([name for name in (COUNTS, IDENTITY) if name in keys])
        check_identity(spec.hashing, spec.name, common.get(IDENTITY))
        slices: dict[tuple[int, int], dict[str, Any]] = {}
        for rows in {shard.rows for shard in table.here}:
            slices[rows] = slice_state(spec.hashing, common, *rows)
            targets = {}
            for name, size in sizes.items():
                part = parts_between(spec.hashing, *rows) if name == SLICE_COUNTS else range(*rows)
                target = torch.empty(len(part), *size[1:], dtype=saved[keys[name]].dtype, device="cpu")
                targets[start + keys[name]] = Parts(size).put((part.start, *(0 for _ in size[1:])), target)
                slices[rows][name] = target
            folder.read_into(targets)
        pieces = fit_slices(module, table.here, slices)
    plan.indexes = {shard.name: piece for shard, piece in pieces.items()}


def read_rows(
    folder: SavedFolder, name: str, shard: Shard, move: RowMove | None, target: Tensor, column: int, row: int = 0
) -> None:
    """Read the rows of one shard into ``target``, and as many columns as ``target`` has.

    Args:
        folder: the data folder.
        name: name of the saved tensor.
        shard: the shard whose rows are read.
        move: where rows are now; None if they are where they were.
        target: the tensor to read into; rows for which nothing was saved stay as they are.
        column: the first column that is read.
        row: the position of the table's row 0.
    """
    (first, end), described = shard.rows, folder.described[name]
    if move is None:
        folder.read_into({name: Parts(tuple(described.shape)).put((row + first, column), target)})
        return
    here = move.within(first, end)
    if here.old_rows.numel() == 0:
        return
    begin = int(here.old_rows.min())  # a shard's buckets are adjacent, so this reads few rows of other shards
    part = torch.empty(int(here.old_rows.max()) + 1 - begin, target.shape[1], dtype=described.dtype, device="cpu")
    folder.read_into({name: Parts(tuple(described.shape)).put((row + begin, column), part)})
    RowMove(part.shape[0], here.old_rows - begin, here.new_rows).apply(part, target.detach())
