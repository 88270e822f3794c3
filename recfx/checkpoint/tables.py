"""The tables of a model: each rank saves, checks and loads its own rows and columns of them.

They are saved as parts of whole tensors, under the names of an unsharded model. An unsharded table is one shard, which
every rank has and the first one saves. If a table has more rows than it was saved with, every rank reads its whole
index, because ids move. No rank ever holds whole weights or optimizer state of a table that was saved in shards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from recfx.checkpoint.contents import check_saved_as, check_tensor
from recfx.checkpoint.storage import Parts, SavedFolder
from recfx.collections.converted_collection import ConvertedCollection, collections_by_prefix
from recfx.collections.kinds import kind_of
from recfx.collections.pieces import Piece
from recfx.collections.table_state import check_weight, fit_cut_index, fit_whole_index, saved_shape
from recfx.hashing.identity import IDENTITY, check_identity
from recfx.hashing.index import HashIndex
from recfx.hashing.row_move import RowMove
from recfx.hashing.slices import COUNTS, SLICE_COUNTS, STATISTICS, part_count
from recfx.hashing.state import NOT_BY_ROW, state_names
from recfx.ir.shards import ShardedTable
from recfx.ir.tables import Shard, TableSpec
from recfx.optim.fused_optimizer import FusedOptimizer


@dataclass(frozen=True)
class Table:
    """One table of a converted collection under one name."""

    prefix: str  # the prefix of its collection
    module: ConvertedCollection
    placed: ShardedTable  # the whole table and its shards; what is saved of them is one copy of each number
    first: bool  # whether this is the first name of the collection

    @property
    def spec(self) -> TableSpec:
        return self.placed.table

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def weight(self) -> str:
        """Name of the weight in the model."""
        return self.prefix + kind_of(self.module).weight_name("", self.name)

    @property
    def here(self) -> list[Shard]:
        return self.module.sharding.local_of(self.name)

    @property
    def saved_here(self) -> list[Shard]:
        """The shards of this rank that are saved."""
        return [shard for shard in self.placed.saved if shard.rank == self.module.sharding.rank]

    @cached_property
    def index_keys(self) -> dict[str, str]:
        """Names of its index's state in the model, by buffer name; empty if it has no index."""
        names = state_names(self.spec.hashing) if self.spec.hashing is not None and self.spec.has_index else ()
        return {name: f"{self.prefix}hash_indexes.{self.name}.{name}" for name in names}

    @property
    def weights(self) -> list[Tensor]:
        return [self.module.store.weight(shard.name) for shard in self.here]

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtypes[self.name] if self.module.is_sharded else self.module.weight(self.name).dtype

    @property
    def indexes(self) -> list[HashIndex]:
        return [self.module.store.index(shard.name) for shard in self.here] if self.spec.has_index else []

    @property
    def fused(self) -> FusedOptimizer | None:
        """Rule and settings of its fused optimizer, if it has one; the state is that of ``fused_of``."""
        return self.module.fused_optimizers().get(self.name)

    def fused_of(self, shard: Shard) -> FusedOptimizer:
        return self.module.store.optimizers[shard.name]


def tables_of(model: nn.Module) -> list[Table]:
    """Every table of a converted collection under every name: a state has the keys of a shared module once per name."""
    tables: list[Table] = []
    seen: set[int] = set()
    for prefix, module in collections_by_prefix(model, ConvertedCollection):
        tables += [Table(prefix, module, placed, id(module) not in seen) for placed in module.sharding.tables]
        seen.add(id(module))
    return tables


@dataclass
class TablePlan:
    """What is to be done to this rank's shards of one table."""

    table: Table  # the table and its collection
    name: str  # the name of its weight in the folder
    move: RowMove | None = None  # where the rows go, if the table has more rows than saved
    indexes: dict[str, dict[str, Any]] = field(default_factory=dict)  # state of the shards' indexes, by shard name

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


def plan_tables(
    tables: Iterable[Table], folder: SavedFolder, saved: Mapping[str, Tensor], start: str
) -> list[TablePlan]:
    """Check the saved state of tables, whose names begin with ``start`` in the folder, against this rank's shards."""
    plans = []
    for table in tables:
        if table.first:
            for weight in table.weights:
                check_tensor(table.weight, weight)
            plan = TablePlan(table, start + table.weight)
            if table.spec.has_index:
                _plan_index(plan, folder, saved, start)
            rows, dim = shape = table.spec.num_embeddings, table.spec.embedding_dim
            check_saved_as(table.weight, saved[table.weight], table.dtype, shape, saved_shape(rows, dim, plan.move))
            plans.append(plan)
    return plans


def _plan_index(plan: TablePlan, folder: SavedFolder, saved: Mapping[str, Tensor], start: str) -> None:
    table, store = plan.table, plan.table.module.store
    spec, rank = table.spec, table.module.sharding.rank
    assert spec.hashing is not None
    keys = {name: key for name, key in table.index_keys.items() if key in saved}
    check_weight(spec.name, saved.get(keys.get("row_ids", "")), saved[table.weight], spec.embedding_dim)

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        tensors = folder.read([start + keys[name] for name in names])
        return {name: tensors[start + keys[name]] for name in names}

    sizes: dict[str, tuple[int, ...]] = {name: (spec.num_embeddings,) for name in keys if name not in NOT_BY_ROW}
    if SLICE_COUNTS in keys:
        sizes[SLICE_COUNTS] = (part_count(spec.hashing), len(STATISTICS))
    if any(saved[keys[name]].shape != size for name, size in sizes.items()):
        pieces, plan.move = fit_whole_index(store, table.here, spec, read(keys), saved[table.weight])
    else:
        whole = read([name for name in (COUNTS, IDENTITY) if name in keys])
        check_identity(spec.hashing, spec.name, whole.get(IDENTITY))
        targets = {start + keys[name]: Parts(size) for name, size in sizes.items()}

        def part_of(name: str, piece: Piece) -> Tensor:
            part = torch.empty(piece.sizes, dtype=saved[keys[name]].dtype, device="cpu")
            targets[start + keys[name]].put(piece.offsets, part)
            return part

        pieces = fit_cut_index(store, table.placed, rank, whole, sizes, part_of, lambda: folder.read_into(targets))
    plan.indexes = {shard.name: piece for shard, piece in pieces.items()}


def read_rows(
    folder: SavedFolder, name: str, shard: Shard, move: RowMove | None, target: Tensor, column: int, row: int = 0
) -> None:
    """Read a shard's rows of a saved tensor into ``target``, and as many columns as that has, from ``column`` on.

    ``move`` says where rows are now, if they are not where they were; rows for which nothing was saved stay as they
    are. The table's row 0 is the tensor's row ``row``.
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
