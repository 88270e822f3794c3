"""Which saved rows and which saved index fit a table, and what this rank loads of them: for every way of loading.

``load_state_dict`` and checkpoints ask here, with what they have: whole tensors, or only the shapes of what they will
read later. All of a state is checked and cut before any of it is loaded, and nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.errors import CheckpointError, type_of
from recfx.hashing import HashIndex, state
from recfx.hashing.row_move import RowMove, fit_rows
from recfx.hashing.slices import slice_state
from recfx.hashing.storage import say_what_is_lost
from recfx.ir.shards import ShardedTable
from recfx.ir.tables import Shard, TableSpec
from recfx.kernels.index.index_buffers import FREED, NEVER_USED
from recfx.runtime.base import load_hooks

STRICT: ContextVar[bool] = ContextVar("strict", default=True)
"""The ``strict`` of the ``load_state_dict`` that is running, which torch does not tell the modules."""


def fit_index(
    index: HashIndex, saved: Mapping[str, object], weight: object, dim: int
) -> tuple[dict[str, object], RowMove | None]:
    """What an index loads of a saved one, by buffer name; and where the table's rows go, None if no row moves.

    Args:
        index: the index that is to load the state, or that of the whole table on meta.
        weight: the saved weight of its table; only its shape is read, and it is ignored if it is not a tensor.

    Raises:
        CheckpointError: what is wrong with the index, or ``torn_state`` or ``columns_mismatch`` if the saved weight
            does not fit it.
    """
    check_weight(index.name, saved.get("row_ids"), weight, dim)
    buffers, move = fit_rows(index, saved)
    index.buffers_of(buffers)  # which checks them
    return buffers, move


def without_index(*, has_weight: bool, holds_ids: Callable[[], bool]) -> str:
    """What an index does if nothing was saved for it, ``state.KEEP`` or ``state.FORGET``."""
    return state.KEEP if not has_weight or (holds_ids() and not STRICT.get()) else state.FORGET


def first_rows(weight: object, rows: int, dim: int) -> RowMove | None:
    """The move of a table that had fewer rows and no index when it was saved: all its rows stay where they are."""
    if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] < rows and weight.shape[1] == dim:
        return RowMove.keep_first(weight.shape[0])
    return None


def saved_shape(rows: int, dim: int, move: RowMove | None) -> tuple[int, int]:
    """The only shape of a saved weight that fits a table of ``[rows, dim]`` whose rows move like this."""
    return (rows if move is None else move.saved_rows, dim)


def check_weight(name: str, row_ids: object, saved: object, dim: int) -> None:
    """Check that a saved weight has the rows of its index, and the columns of the table.

    torch would load the index and only then complain about the weight.
    """
    if not isinstance(saved, Tensor) or not isinstance(row_ids, Tensor):
        return
    if saved.dim() != 2 or saved.shape[0] != row_ids.numel():
        raise CheckpointError(
            f"The saved index has {row_ids.numel()} rows, but the saved weight has the shape {tuple(saved.shape)}.",
            reason="torn_state",
            module_path=name,
            what_to_do="The saved state is damaged: use another one.",
        )
    if saved.shape[1] != dim:
        raise CheckpointError(
            f"The saved rows have {saved.shape[1]} columns, but those of this table have {dim}.",
            reason="columns_mismatch",
            module_path=name,
            what_to_do="Build the table with the embedding_dim that it was saved with.",
        )


def check_shape(path: str, saved: object, shape: tuple[int, int]) -> None:
    """Refuse a saved weight of another shape, before its index forgets anything (``shape_mismatch``)."""
    if isinstance(saved, Tensor) and tuple(saved.shape) != shape:
        raise CheckpointError(
            f"the saved weight is {tuple(saved.shape)}, but the table is {shape}.",
            reason="shape_mismatch",
            module_path=path,
            what_to_do="build the table as it was built when saving.",
        )


def without_weight(name: str) -> CheckpointError:
    """The error for an index that was saved without its table."""
    return CheckpointError(
        "The state has the index but not the weight of its table: ids would find the rows of other ids.",
        reason="torn_state",
        module_path=name,
        what_to_do="Load the index together with the weight, or leave out the keys of both.",
    )


def whole_index(table: TableSpec) -> HashIndex:
    """The index of the whole table, on meta: its settings without its content."""
    assert table.hashing is not None
    return HashIndex(table.num_embeddings, config=table.hashing, name=table.name, device="meta")


def fit_whole_index(
    module: ConvertedCollection, table: TableSpec, shards: Sequence[Shard], saved: Mapping[str, Any], weight: object
) -> tuple[dict[Shard, dict[str, Tensor]], RowMove | None]:
    """Fit and check the saved index of a whole table, in the same way on all ranks, and cut it.

    Args:
        shards: this rank's shards of the table.
        saved: the saved state of its index, by buffer name.
        weight: the saved weight of the table, or a meta tensor like it.

    Returns:
        what this rank's shards take from it, and the move of the table's rows; None if no row moves.
    """
    fitted, move = fit_index(whole_index(table), saved, weight, table.embedding_dim)
    tensors = {name: value for name, value in fitted.items() if isinstance(value, Tensor)}
    config = table.hashing
    assert config is not None
    pieces = {shard: slice_state(config, tensors, *shard.rows) for shard in shards}
    if move is not None:
        for shard, piece in pieces.items():
            row_state = module.index(shard.name).row_state
            if not row_state.is_meta:
                # Rows without an id keep their weights, and so the index keeps what it knows about them.
                piece["row_state"][(piece["row_state"] == NEVER_USED) & (row_state != NEVER_USED)] = FREED
    return pieces, move


def fit_slices(
    module: ConvertedCollection, shards: Sequence[Shard], slices: Mapping[tuple[int, int], dict[str, Any]]
) -> dict[Shard, dict[str, Any]]:
    """The slice of an index that each of this rank's shards loads: column blocks of the same rows load the same.

    Args:
        slices: the saved state of each slice, by its rows and by buffer name.
    """
    pieces = {shard: slices[shard.rows] for shard in shards}
    for shard, piece in pieces.items():
        module.index(shard.name).buffers_of(piece)  # which checks it
    return pieces


class LocalState:
    """What this rank takes of a state of whole tensors: its shards of each; all of it if they are not sharded.

    Attributes:
        taken: the keys of ``saved`` that belong to this collection's tables, and that ``local`` replaces.
        local: what goes to this rank's shards, by their keys.
        missing: keys that ``saved`` lacks, and the tables they belong to.
        moves: where the rows go of tables that have more rows now, by table.

    Raises:
        CheckpointError: what is wrong with an index, or ``torn_state`` or ``shape_mismatch`` if its table's weight is
            missing or does not fit it.
    """

    def __init__(self, module: ConvertedCollection, saved: Mapping[str, Any], prefix: str) -> None:
        self.module, self.saved, self.prefix, self.kind = module, saved, prefix, kind_of(module)
        self.taken: list[str] = []
        self.local: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.moves: dict[str, RowMove] = {}
        for table in module.sharding.tables:
            self._take_table(table)

    def say_what_is_lost(self, indexes: Mapping[str, HashIndex]) -> None:
        """Say once for ``indexes``, by the start of their keys, what they would each say that load a state without one.

        One with load hooks may find itself in the state after all, and says it.
        """
        absent = {f"{start}{state.ABSENT}": index for start, index in indexes.items() if not load_hooks(index)}
        forgetting = {key: index for key, index in absent.items() if self.local.get(key) == state.FORGET}
        say_what_is_lost(list(forgetting.values()))
        self.local.update(dict.fromkeys(forgetting, state.FORGET_AS_SAID))

    def _take_table(self, table: ShardedTable) -> None:
        key = self.prefix + self.kind.weight_name("", table.table.name)
        weight = self.saved.get(key)
        if table.table.has_index:
            self._take_index(table, weight, key)
        if weight is None:
            self.missing[key] = table.table.name
        elif self.module.is_sharded or (table.table.name in self.moves and isinstance(weight, Tensor)):
            self.taken.append(key)
            for shard, part in self.weights(table, weight, key).items():
                self.local[self.prefix + self.kind.weight_name("", shard.name)] = part

    def weights(self, table: ShardedTable, weight: Any, key: str) -> dict[Shard, Tensor]:
        """The parts of a saved weight that this rank's shards load."""
        spec, move = table.table, self.moves.get(table.table.name)
        if not isinstance(weight, Tensor) or weight.is_meta:
            raise CheckpointError(
                f"the saved weight is {'a tensor on meta' if isinstance(weight, Tensor) else type_of(weight)}.",
                reason="not_a_tensor",
                module_path=key,
                what_to_do="load a state of tensors or ShardedTensors.",
            )
        check_shape(key, weight, saved_shape(spec.num_embeddings, spec.embedding_dim, move))
        return {shard: self._part(shard, weight.detach(), move) for shard in self.module.sharding.local_of(spec.name)}

    def _part(self, shard: Shard, weight: Tensor, move: RowMove | None) -> Tensor:
        if move is None:
            return shard.of(weight)
        (first, end), (left, right) = shard.rows, shard.columns
        current = self.module.weight(shard.name).detach()
        if current.is_meta:
            raise CheckpointError(
                f"The saved table has {move.saved_rows} rows, this one has {shard.table.num_embeddings} and is on the "
                "meta device.",
                reason="rows_mismatch",
                module_path=self.prefix + shard.table.name,
                what_to_do="Call to_empty() and reset_parameters() first.",
            )
        return move.within(first, end).apply(weight[:, left:right], current.to(weight.device, weight.dtype, copy=True))

    def _take_index(self, table: ShardedTable, weight: Any, key: str) -> None:
        spec, local = table.table, self.module.sharding.local_of(table.table.name)
        assert spec.hashing is not None
        keys = {name: f"{self.prefix}hash_indexes.{spec.name}.{name}" for name in state.EVERY_NAME}
        saved = {name: self.saved[keys[name]] for name in state.state_names(spec.hashing) if keys[name] in self.saved}
        if self.module.is_sharded:
            self.taken.extend(name for name in keys.values() if name in self.saved)
        holders: Any = self.kind.tables_of(self.module)
        # A hook of the user's below may still bring the weight, by another name; an index with one checks itself.
        has_weight = weight is not None or any(map(load_hooks, (holders, *(holders[shard.name] for shard in local))))
        checks_itself = any(load_hooks(self.module.index(shard.name)) for shard in local)
        if not state.has_index(saved):
            forgets = self._take_absent(local, has_weight) or self.module.is_sharded
            if weight is None:
                self.missing.update({keys[name]: spec.name for name in state.state_names(spec.hashing)})
            elif forgets and not checks_itself and not isinstance(weight, ShardedTensor):
                move = first_rows(weight, spec.num_embeddings, spec.embedding_dim)
                check_shape(key, weight, saved_shape(spec.num_embeddings, spec.embedding_dim, move))
                self.moves.update({} if move is None else {spec.name: move})
        elif not checks_itself:
            if not has_weight:
                raise without_weight(spec.name)
            pieces = self.indexes(table, saved, weight)
            if self.module.is_sharded or spec.name in self.moves:
                for shard, piece in pieces.items():
                    start = f"{self.prefix}hash_indexes.{shard.name}."
                    self.local.update({f"{start}{name}": value for name, value in piece.items()})

    def _take_absent(self, local: Sequence[Shard], has_weight: bool) -> bool:
        """Say what the indexes do without a saved one; whether one of them forgets its ids."""
        forgets = False
        for shard in local:
            what = without_index(has_weight=has_weight, holds_ids=self.module.index(shard.name).holds_ids)
            self.local[f"{self.prefix}hash_indexes.{shard.name}.{state.ABSENT}"] = what
            forgets |= what == state.FORGET
        return forgets

    def indexes(self, table: ShardedTable, saved: Mapping[str, Any], weight: Any) -> dict[Shard, dict[str, Any]]:
        """The parts of a saved index that this rank's shards load, by buffer name."""
        local = self.module.sharding.local_of(table.table.name)
        pieces, move = fit_whole_index(self.module, table.table, local, saved, weight)
        self.moves.update({} if move is None else {table.table.name: move})
        return pieces
