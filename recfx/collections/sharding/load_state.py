"""``load_state_dict`` of a sharded collection: all of it is checked and cut before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.fit_table import (
    check_shape,
    first_rows,
    fit_index,
    saved_shape,
    say_what_is_lost_together,
    without_index,
    without_weight,
)
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.state import (
    ShardedTables,
    index_pieces,
    other_plan,
    parts_of,
    weight_pieces,
    whole_index,
)
from recfx.errors import CheckpointError, type_of
from recfx.hashing import state
from recfx.hashing.identity import IDENTITY, check_identity
from recfx.hashing.row_move import RowMove, check_saved_index, saved_names
from recfx.hashing.slices import COUNTS, slice_state
from recfx.ir.shards import ShardedTable
from recfx.ir.tables import Shard, TableSpec
from recfx.kernels.index.index_buffers import FREED, NEVER_USED

_CUT_OTHERWISE = "the state is cut in a different way than this table."


def fit_whole_index(
    module: ConvertedCollection, table: TableSpec, shards: Sequence[Shard], saved: Mapping[str, Any], weight: object
) -> tuple[dict[Shard, dict[str, Tensor]], RowMove | None]:
    """Fit and check the index of a whole table, in the same way on all ranks, and cut it.

    Args:
        module: the collection of the table.
        table: the whole table.
        shards: this rank's shards of it.
        saved: the saved state of its index, by buffer name.
        weight: the saved weight of the table, or a meta tensor like it.

    Returns:
        what this rank's shards take from it, and the move of the table's rows; None if no row moves.

    Raises:
        CheckpointError: the same as ``fit_index``.
    """
    fitted, move = fit_index(whole_index(table), saved, weight, table.embedding_dim)
    tensors = {name: value for name, value in fitted.items() if isinstance(value, Tensor)}
    config = table.hashing
    assert config is not None
    pieces = {shard: slice_state(config, tensors, *shard.rows) for shard in shards}
    if move is not None:
        for shard, piece in pieces.items():
            row_state = module.index(shard.name).row_state
            # Rows without an id keep their weights, and so the index keeps what it knows about them.
            piece["row_state"][(piece["row_state"] == NEVER_USED) & (row_state != NEVER_USED)] = FREED
    return pieces, move


def fit_slices(
    module: ConvertedCollection, shards: Sequence[Shard], slices: Mapping[tuple[int, int], dict[str, Any]]
) -> dict[Shard, dict[str, Any]]:
    """The slice of an index that each shard loads. Column blocks of the same rows load the same slice.

    Args:
        module: the collection of the table.
        shards: this rank's shards of it.
        slices: the saved state of each slice, by its rows and by buffer name.

    Raises:
        CheckpointError: the same as ``check_saved_index``; each rank checks its own slices.
    """
    pieces = {shard: slices[shard.rows] for shard in shards}
    for shard, piece in pieces.items():
        check_saved_index(module.index(shard.name), piece)
    return pieces


def load_local_state(
    module: ShardedTables,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    *rest: Any,
) -> None:
    """A load hook that replaces whole tables with this rank's shards.

    Raises:
        CheckpointError: the same as ``LocalState``. Nothing of this collection has changed.
    """
    planned = LocalState(module, state_dict, prefix)
    names = [shard.name for shard in module.sharding.local() if shard.table.has_index]
    indexes = {f"{prefix}hash_indexes.{name}.": module.index(name) for name in names}
    say_what_is_lost_together(planned.local, indexes)
    for index in indexes.values():
        index.expect_load()
    for key in planned.taken:
        del state_dict[key]
    state_dict.update(planned.local)
    if local_metadata.get("assign_to_params_buffers"):
        tensors = {key: value for key, value in planned.local.items() if isinstance(value, Tensor)}
        state_dict.update({key: value.clone(memory_format=torch.contiguous_format) for key, value in tensors.items()})
    here = {shard.table.name for shard in module.sharding.local()}
    missing_keys.extend(key for key, table in planned.missing.items() if table not in here)
    module.note_row_moves(planned.moves)


def drop_shard_names(module: ShardedTables, incompatible_keys: Any) -> None:
    """A hook after loading that reports missing keys by table."""
    others = [shard.name for shard in module.sharding.local() if shard.name != shard.table.name]
    tables = kind_of(module).tables
    names = tuple(f"{part}.{name}." for name in others for part in (tables, "hash_indexes"))
    missing: list[str] = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not any(name in key for name in names)]


class LocalState:
    """What this rank takes of a state of whole tensors, or of ``ShardedTensor``s that were cut in the same way.

    Attributes:
        taken: the keys of ``saved`` that belong to this collection's tables.
        local: what goes to this rank's shards, by their keys.
        missing: keys that ``saved`` lacks, and the tables they belong to.
        moves: where the rows go of tables that have more rows now, by table.

    Raises:
        CheckpointError: ``other_plan``, ``shape_mismatch``, ``not_a_tensor``, ``torn_state``, or any other code for
            what is wrong with an index.
    """

    def __init__(self, module: ShardedTables, saved: Mapping[str, Any], prefix: str) -> None:
        self.module, self.saved, self.prefix = module, saved, prefix
        self.taken: list[str] = []
        self.local: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.moves: dict[str, RowMove] = {}
        for table in module.sharding.tables:
            self._take_table(table)

    def _take_table(self, table: ShardedTable) -> None:
        name = table.table.name
        key = self.prefix + kind_of(self.module).weight_name("", name)
        weight = self.saved.get(key)
        if table.table.has_index:
            self._take_index(table, weight)
        if weight is None:
            self.missing[key] = name
            return
        self.taken.append(key)
        for shard, part in self._weights(table, weight, key).items():
            self.local[self.prefix + kind_of(self.module).weight_name("", shard.name)] = part

    # Weights

    def _weights(self, table: ShardedTable, weight: Any, key: str) -> dict[Shard, Tensor]:
        group, move, spec = self.module.groups.pooled, self.moves.get(table.table.name), table.table
        if isinstance(weight, ShardedTensor):
            if table.is_replicated:
                raise other_plan(_CUT_OTHERWISE, key)
            return {piece.shard: part for piece, part in parts_of(weight, weight_pieces(table), group, key).items()}
        if not isinstance(weight, Tensor) or weight.is_meta:
            raise _not_a_tensor(key, weight)
        check_shape(key, weight, saved_shape(spec.num_embeddings, spec.embedding_dim, move))
        return {shard: self._part(shard, weight.detach(), move) for shard in self.module.sharding.local_of(spec.name)}

    def _part(self, shard: Shard, weight: Tensor, move: RowMove | None) -> Tensor:
        if move is None:
            return shard.of(weight)
        (first, end), (left, right) = shard.rows, shard.columns
        current = self.module.weight(shard.name).detach().to(weight.device, weight.dtype, copy=True)
        return move.within(first, end).apply(weight[:, left:right], current)

    # Indexes

    def _take_index(self, table: ShardedTable, weight: Any) -> None:
        spec, whole = table.table, whole_index(table.table)
        keys = {name: f"{self.prefix}hash_indexes.{spec.name}.{name}" for name in state.EVERY_NAME}
        self.taken.extend(key for key in keys.values() if key in self.saved)
        saved = {name: self.saved[keys[name]] for name in saved_names(whole) if keys[name] in self.saved}
        if not state.has_index(saved):
            self._take_absent(table, weight, keys)
            return
        if weight is None:
            raise without_weight(spec.name)
        values = [weight, *(value for name, value in saved.items() if name not in state.NOT_BY_ROW)]
        if any(isinstance(value, ShardedTensor) for value in values):
            pieces = self._sharded_index(table, saved, values)
        else:
            pieces, move = fit_whole_index(self.module, spec, self.module.sharding.local_of(spec.name), saved, weight)
            self.moves.update({} if move is None else {spec.name: move})
        for shard, piece in pieces.items():
            for name, value in piece.items():
                self.local[f"{self.prefix}hash_indexes.{shard.name}.{name}"] = value

    def _take_absent(self, table: ShardedTable, weight: Any, keys: Mapping[str, str]) -> None:
        """Empty the index if the state is that of a plain table."""
        spec = table.table
        for shard in self.module.sharding.local_of(spec.name):
            what = without_index(has_weight=weight is not None, holds_ids=self.module.index(shard.name).holds_ids)
            self.local[f"{self.prefix}hash_indexes.{shard.name}.{state.ABSENT}"] = what
        if weight is None:
            self.missing.update({keys[name]: spec.name for name in saved_names(whole_index(spec))})
        elif not isinstance(weight, ShardedTensor):
            move = first_rows(weight, spec.num_embeddings, spec.embedding_dim)
            if move is not None:
                self.moves[spec.name] = move

    def _sharded_index(
        self, table: ShardedTable, saved: Mapping[str, Any], values: list[Any]
    ) -> dict[Shard, dict[str, Any]]:
        """Check slices of an index: each rank checks its own."""
        spec, group = table.table, self.module.groups.pooled
        assert spec.hashing is not None
        path = f"{self.prefix}hash_indexes.{spec.name}"
        if table.is_replicated or not all(isinstance(value, ShardedTensor) for value in values):
            raise other_plan(_CUT_OTHERWISE, path)
        check_identity(spec.hashing, spec.name, saved.get(IDENTITY))
        local = self.module.sharding.local_of(spec.name)
        slices: dict[tuple[int, int], dict[str, Any]] = {shard.rows: {} for shard in local}
        for name, value in saved.items():
            if not isinstance(value, ShardedTensor):  # the same on all ranks
                for rows, piece in slices.items():
                    piece.update(slice_state(spec.hashing, {name: value}, *rows))
                continue
            pieces = index_pieces(table, name, group.rank())
            parts = parts_of(value, pieces, group, f"{path}.{name}")
            if name == COUNTS and parts:
                counts = torch.cat([parts[piece] for piece in pieces])
                for rows, piece in slices.items():
                    piece.update(slice_state(spec.hashing, {name: counts}, *rows))
            elif name != COUNTS:
                for part, tensor in parts.items():
                    slices[part.shard.rows][name] = tensor
        return fit_slices(self.module, local, slices)


def _not_a_tensor(path: str, value: object) -> CheckpointError:
    what = "a tensor on meta" if isinstance(value, Tensor) else type_of(value)
    return CheckpointError(
        f"the saved weight is {what}.",
        reason="not_a_tensor",
        module_path=path,
        what_to_do="load a state of tensors or ShardedTensors.",
    )
