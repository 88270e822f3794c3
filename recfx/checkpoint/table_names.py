"""The tables of a model and of their indexes, by their names in a checkpoint.

A sharded table has the names of a whole one. Which names an index has depends on its policy, so this file also says
which of them a table must have and which it may have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import itemgetter

from torch import Tensor, nn

from recfx.checkpoint.contents import BUILD_AS_SAVED, check_names, mismatch
from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import collections_by_prefix
from recfx.collections.kinds import KINDS, kind_of
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.state import whole_index
from recfx.collections.wrappers import without_wrappers
from recfx.errors import CheckpointError, few
from recfx.hashing.identity import IDENTITY
from recfx.hashing.index import HashIndex
from recfx.hashing.row_move import saved_names
from recfx.hashing.state import EVERY_NAME
from recfx.ir.shard import Shard
from recfx.ir.shards import ShardedTable


@dataclass(frozen=True)
class NamedTable:
    """One sharded table under one name.

    Args:
        prefix: the prefix of its collection.
        module: its collection.
        table: the table and its shards.
        first: whether this is the first name of the collection.
    """

    prefix: str
    module: ShardedCollection
    table: ShardedTable
    first: bool

    @property
    def name(self) -> str:
        return self.table.table.name

    @property
    def weight(self) -> str:
        """Name of the weight in the model."""
        return self.prefix + kind_of(self.module).weight_name("", self.name)

    def index_keys(self) -> dict[str, str]:
        """Names of its index's state in the model, by buffer name; empty if it has no index."""
        if not self.table.table.has_index:
            return {}
        names = saved_names(whole_index(self.table.table))
        return {name: f"{self.prefix}hash_indexes.{self.name}.{name}" for name in names}

    def local(self) -> list[Shard]:
        """The shards of this rank."""
        return self.module.sharding.local_of(self.table.table.name)

    def local_indexes(self) -> list[HashIndex]:
        """The indexes of the shards of this rank."""
        if not self.table.table.has_index:
            return []
        return [self.module.store.index(shard.name) for shard in self.local()]

    def own_saved_shards(self) -> list[Shard]:
        """The shards of this rank that are saved: one copy of each number."""
        return [shard for shard in self.table.saved if shard.rank == self.module.sharding.rank]

    def own_saved_slices(self) -> list[Shard]:
        """One shard per slice of rows whose index this rank saves; all column blocks have the same index."""
        slices = self.table.slices(self.table.saved)
        return [shard for shard in slices if shard.rank == self.module.sharding.rank]

    def is_first_shard_here(self) -> bool:
        """Whether this rank saves what all shards have in common."""
        return self.table.saved[0].rank == self.module.sharding.rank


def sharded_tables(model: nn.Module) -> list[NamedTable]:
    """Every sharded table under every name: a state has the keys of a shared module once per name."""
    seen: set[int] = set()
    tables = []
    for prefix, module in collections_by_prefix(model, ShardedCollection):
        tables += [NamedTable(prefix, module, table, id(module) not in seen) for table in module.sharding.tables]
        seen.add(id(module))
    return tables


def sharded_names(model: nn.Module) -> set[str]:
    """The keys of a state that belong to sharded tables."""
    return {key for table in sharded_tables(model) for key in (table.weight, *table.index_keys().values())}


def sharded_parameters(model: nn.Module) -> dict[int, tuple[NamedTable, Shard]]:
    """The shard that each parameter of this rank is, by the ``id`` of the parameter."""
    return {
        id(table.module.store.weight(shard.name)): (table, shard)
        for table in sharded_tables(model)
        if table.first
        for shard in table.local()
    }


_NEEDED = ("row_ids", "row_state", IDENTITY)
_LONGEST_NAME = 1000
_READ_ANYWAY = 1 << 20  # small enough to read, so that the error says exactly what is wrong
_OPTIONAL = tuple(name for name in EVERY_NAME if name not in _NEEDED)


def table_prefixes(model: nn.Module) -> dict[tuple[str, str], set[str]]:
    """The keys of every index that is not sharded, by prefix of its collection and name of its table."""
    return {
        (prefix, table): {f"{prefix}hash_indexes.{table}.{name}" for name in saved_names(collection.index(table))}
        for prefix, collection in collections_by_prefix(model, UnshardedCollection)
        for table in collection.hash_indexes
    }


def fit_names(
    model: nn.Module,
    state: Mapping[str, object],
    saved: Mapping[str, Tensor],
    extra_state: Collection[str],
) -> tuple[list[str], dict[str, Tensor]]:
    """Check the names in a checkpoint against those in the model's ``state_dict``.

    Some keys of an index are needed under some policies only: an index loads without them, as
    ``state.buffers_from_state`` says, and does not use those that it does not need.

    Args:
        model: the model.
        state: its ``state_dict``.
        saved: shapes and dtypes of what is saved, by name in the model.
        extra_state: the names of what is saved besides tensors.

    Returns:
        The names in ``state`` that are to be loaded, and the part of ``saved`` that is used.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    sharded = [(table.prefix, table.name) for table in sharded_tables(model) if table.table.table.has_index]
    tables = [*table_prefixes(model), *sharded]
    check_same_tables_have_indexes(tables, state, saved)
    optional = {f"{prefix}hash_indexes.{table}.{name}" for prefix, table in tables for name in _OPTIONAL}
    loaded = [name for name in state if name not in optional or name in saved]
    _check_is_whole_model([name for name in state if name not in optional], [*saved, *extra_state])
    used = {name: tensor for name, tensor in saved.items() if name not in optional or name in state}
    check_names("", loaded, [*used, *extra_state], BUILD_AS_SAVED)
    return loaded, used


def _check_is_whole_model(here: Collection[str], saved: Collection[str]) -> None:
    """Refuse a model that is a part of the saved one, or has it as a part.

    Args:
        here: the names that this model needs.
        saved: the names in the checkpoint.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    in_saved, in_this = "this model is {} in the one that was saved.", "the saved model is {} in this one."
    export_part, pass_part = "pass submodule={} to recfx.export, or load the whole model.", "pass that submodule, {}."
    for names, others, message, what_to_do in (
        (here, saved, in_saved, export_part),
        (saved, here, in_this, pass_part),
    ):
        path, count = max(places_of(names, others).items(), key=itemgetter(1), default=("", 0))
        if 2 * count > len(names) and not set(names) & set(others):
            path = without_wrappers(path) or path
            raise mismatch(message.format(ascii(path)), module_path=path, what_to_do=what_to_do.format(ascii(path)))


def places_of(names: Collection[str], saved: Collection[str]) -> Counter[str]:
    """The submodules that have names of a model: how many of ``names`` are among ``saved`` behind each path."""
    expected = set(names)
    short = [name for name in saved if len(name) <= _LONGEST_NAME]  # others would take long, and nobody has them
    dots = [(name, place) for name in short for place, letter in enumerate(name) if letter == "."]
    return Counter(name[:dot] for name, dot in dots if name[dot + 1 :] in expected)


def prefix_of(submodule: str, names: Collection[str], saved: Collection[str]) -> str:
    """What the names of a submodule begin with in a checkpoint, where it may be in wrappers, as in ``ranker.module.``.

    Args:
        submodule: its path without wrappers, or with them; empty for the whole model.
        names: the names of its state.
        saved: the names in the checkpoint.

    Raises:
        CheckpointError: ``checkpoint_mismatch``: there is no such submodule.
    """
    if not submodule:
        return ""
    places = places_of(names, saved)
    alike = [path for path in places if without_wrappers(path) == without_wrappers(submodule)]
    if not alike and not any(name.startswith(f"{submodule}.") for name in saved):
        others = few([ascii(without_wrappers(path) or path) for path, _ in places.most_common(3)], 3)
        raise mismatch(
            f"the checkpoint has no submodule {submodule!a}.",
            module_path=submodule,
            what_to_do=f"pass one that has the parts of this model: {others}." if places else BUILD_AS_SAVED,
        )
    return f"{max(alike, key=places.__getitem__, default=submodule)}."


def check_same_tables_have_indexes(
    tables: Collection[tuple[str, str]], state: Collection[str], saved: Collection[str]
) -> None:
    """Refuse tables that have an index on one side only: without it, the rows of ids mean nothing.

    Args:
        tables: the tables of this model that have an index.
        state: names in this model.
        saved: names in the checkpoint.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    with_index = dict.fromkeys(owner for owner in map(_table_of, saved) if owner is not None)
    for prefix, table in tables:
        if (prefix, table) not in with_index and _has_weight(saved, prefix, table):
            raise mismatch(
                f"table {table!r} was saved without an index, but has one here.",
                module_path=prefix.rstrip("."),
                what_to_do="convert with hashing=HashConfig() as when saving, or load the plain state with "
                "load_state_dict, which empties the index.",
            )
    for prefix, table in with_index:
        if (prefix, table) not in tables and _has_weight(state, prefix, table):
            raise mismatch(
                f"the checkpoint has an index for table {table!r}, which has no index here.",
                module_path=prefix.rstrip("."),
                what_to_do="convert with hashing=HashConfig.raw_ids(...) as when saving.",
            )


def check_index_sizes(saved: Mapping[str, Tensor], keys: Collection[str], rows: int, table: str) -> None:
    """Refuse tensors that are far larger than an index can be before they are read, because memory might not suffice.

    Args:
        saved: shapes and dtypes, by name in the model.
        keys: the keys of one index.
        rows: number of rows of its table.
        table: name of the table.

    Raises:
        CheckpointError: ``rows_mismatch``.
    """
    for key in sorted(keys):
        if key in saved and saved[key].numel() > max(rows, _READ_ANYWAY):
            raise CheckpointError(
                f"{key} was saved with {saved[key].numel()} numbers, but the table has {rows} rows here.",
                reason="rows_mismatch",
                module_path=table,
                what_to_do="Build the table with as many rows as when saving; if it was, the checkpoint is damaged.",
            )


def _table_of(name: str) -> tuple[str, str] | None:
    """Prefix of the collection and name of the table whose index has the key ``name``; None if it is not such a key.

    The time grows only with the length of the name, even if the name was chosen maliciously.
    """
    *prefix, indexes, table, buffer = ["", "", *name.rsplit(".", 3)]
    if indexes != "hash_indexes" or buffer not in EVERY_NAME:
        return None
    return f"{prefix[-1]}." * bool(prefix[-1]), table


def _has_weight(names: Collection[str], prefix: str, table: str) -> bool:
    """Whether the table is among these names, in a collection of any kind."""
    return any(prefix + kind.weight_name("", table) in names for kind in KINDS)
