"""What the state of a sharded collection is, and which saved rows and index fit a table, for every way of loading.

All of a state, or only the shapes of what is read later, is checked and cut before any of it is loaded. The state of a
sharded collection has the keys of the unsharded one on every rank, without any communication. Each rank with a copy of
an index, as of column shards, says that the piece is its own: torch.distributed.checkpoint saves one, and loads all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recfx.collections.kinds import CollectionKind, kind_of
from recfx.collections.pieces import (
    Piece,
    index_pieces,
    make_sharded_tensor,
    other_plan,
    own_pieces,
    parts_of,
    weight_pieces,
)  # fmt: skip
from recfx.errors import CheckpointError, type_of
from recfx.hashing import HashIndex, state
from recfx.hashing.identity import IDENTITY, check_identity, identity
from recfx.hashing.row_move import RowMove, fit_rows
from recfx.hashing.slices import COUNTS, SLICE_COUNTS, SliceCounts, slice_state
from recfx.hashing.storage import say_what_is_lost
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.ir.tables import Shard, TableSpec
from recfx.kernels.index.index_buffers import FREED, NEVER_USED
from recfx.runtime.table_store import TableStore

STRICT: ContextVar[bool] = ContextVar("strict", default=True)
"""The ``strict`` of the ``load_state_dict`` that is running, which torch does not tell the modules."""


def saved_shape(rows: int, dim: int, move: RowMove | None) -> tuple[int, int]:
    """The only shape of a saved weight that fits a table of ``[rows, dim]`` whose rows move like this."""
    return (rows if move is None else move.saved_rows, dim)


def check_weight(name: str, row_ids: object, saved: object, dim: int) -> None:
    """Check that a saved weight has the rows of its index, and the columns of the table, which torch does not."""
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


def whole_index(table: TableSpec) -> HashIndex:
    """The index of the whole table, on meta: its settings without its content."""
    assert table.hashing is not None
    return HashIndex(table.num_embeddings, config=table.hashing, name=table.name, device="meta")


def fit_whole_index(
    store: TableStore, local: Sequence[Shard], table: TableSpec, saved: Mapping[str, Any], weight: object
) -> tuple[dict[Shard, dict[str, Any]], RowMove | None]:
    """What each of ``local``, this rank's shards, takes of the saved index of a whole table, which all ranks check
    alike, and the move of the table's rows, if any. ``weight`` is the table's saved weight, or a meta tensor like it.
    """
    index, config = whole_index(table), table.hashing
    assert config is not None
    check_weight(table.name, saved.get("row_ids"), weight, table.embedding_dim)
    fitted, move = fit_rows(index, saved)
    index.buffers_of(fitted)  # which checks them
    tensors = {name: value for name, value in fitted.items() if isinstance(value, Tensor)}
    pieces = {shard: slice_state(config, tensors, *shard.rows) for shard in local}
    for shard, piece in pieces.items() if move is not None else ():
        row_state = store.index(shard.name).row_state
        if not row_state.is_meta:
            # Rows without an id keep their weights, and so the index keeps what it knows about them.
            piece["row_state"][(piece["row_state"] == NEVER_USED) & (row_state != NEVER_USED)] = FREED
    return pieces, move


def fit_cut_index(
    store: TableStore, table: ShardedTable, rank: int, whole: Mapping[str, Tensor], cut: Iterable[str],
    part_of: Callable[[str, Piece], Tensor], read: Callable[[], object] = bool,
) -> dict[Shard, dict[str, Any]]:  # fmt: skip
    """What each shard of a rank loads of an index that was saved with as many rows; the rank checks its own slices.
    ``whole`` has its whole tensors; ``part_of`` returns pieces of those in ``cut``, which ``read`` fills at the end.
    """
    config, local = table.table.hashing, [shard for shard in table.filled if shard.rank == rank]
    assert config is not None
    slices: dict[tuple[int, int], dict[str, Any]] = {
        shard.rows: slice_state(config, whole, *shard.rows) for shard in local
    }
    for name in cut:
        for piece in own_pieces(index_pieces(table, name, rank), rank):
            slices[piece.shard.rows][name] = part_of(name, piece)
    read()
    for shard in local:  # column blocks of the same rows load the same
        store.index(shard.name).buffers_of(slices[shard.rows])  # which checks it
    return {shard: slices[shard.rows] for shard in local}


class LocalState:
    """What this rank takes of a state of whole tensors, or of ``ShardedTensor``s that were cut in the same way."""

    def __init__(
        self, kind: CollectionKind, store: TableStore, sharding: CollectionSharding, group: dist.ProcessGroup | None,
        saved: Mapping[str, Any], prefix: str,
    ) -> None:  # fmt: skip
        self._kind, self._store, self._sharding, self._group = kind, store, sharding, group
        self._saved, self._prefix = saved, prefix
        self.taken: list[str] = []  # the keys of ``saved`` that belong to this collection, and that ``local`` replaces
        self.local: dict[str, Any] = {}  # what goes to this rank's shards, by their keys
        self.missing: dict[str, str] = {}  # keys that ``saved`` lacks, and the tables they belong to
        self.moves: dict[str, RowMove] = {}  # where the rows go of tables that have more rows now, by table
        for table in sharding.tables:
            self._take_table(table)

    def say_what_is_lost(self, indexes: Mapping[str, HashIndex]) -> None:
        """Say once for ``indexes``, by the start of their keys, what each would say that loads a state without one."""
        absent = {f"{start}{state.ABSENT}": index for start, index in indexes.items()}
        forgetting = {key: index for key, index in absent.items() if self.local.get(key) == state.FORGET}
        say_what_is_lost(list(forgetting.values()))
        self.local.update(dict.fromkeys(forgetting, state.FORGET_AS_SAID))

    def _take_table(self, table: ShardedTable) -> None:
        key = self._prefix + self._kind.weight_name("", table.table.name)
        weight = self._saved.get(key)
        if table.table.has_index:
            self._take_index(table, weight, key)
        if weight is None:
            self.missing[key] = table.table.name
        elif self._group is not None or (table.table.name in self.moves and isinstance(weight, Tensor)):
            self.taken.append(key)
            for shard, part in self._weights(table, weight, key).items():
                self.local[self._prefix + self._kind.weight_name("", shard.name)] = part

    def _weights(self, table: ShardedTable, weight: Any, key: str) -> dict[Shard, Tensor]:
        spec, move = table.table, self.moves.get(table.table.name)
        if isinstance(weight, ShardedTensor):
            if table.is_replicated:
                raise other_plan(_CUT_OTHERWISE, key)
            return {piece.shard: part for piece, part in self._parts(table, weight, "weight", key).items()}
        if not isinstance(weight, Tensor) or weight.is_meta:
            raise CheckpointError(
                f"the saved weight is {'a tensor on meta' if isinstance(weight, Tensor) else type_of(weight)}.",
                reason="not_a_tensor",
                module_path=key,
                what_to_do="load a state of tensors or ShardedTensors.",
            )
        check_shape(key, weight, saved_shape(spec.num_embeddings, spec.embedding_dim, move))
        return {shard: self._part(shard, weight.detach(), move) for shard in self._sharding.local_of(spec.name)}

    def _part(self, shard: Shard, weight: Tensor, move: RowMove | None) -> Tensor:
        if move is None:
            return shard.of(weight)
        (first, end), (left, right) = shard.rows, shard.columns
        current = self._store.weight(shard.name).detach()
        if current.is_meta:
            raise CheckpointError(
                f"The saved table has {move.saved_rows} rows, this one has {shard.table.num_embeddings} and is on the "
                "meta device.",
                reason="rows_mismatch",
                module_path=self._prefix + shard.table.name,
                what_to_do="Call to_empty() and reset_parameters() first.",
            )
        return move.within(first, end).apply(weight[:, left:right], current.to(weight.device, weight.dtype, copy=True))

    def _take_index(self, table: ShardedTable, weight: Any, key: str) -> None:
        spec, local = table.table, self._sharding.local_of(table.table.name)
        assert spec.hashing is not None
        keys = {name: f"{self._prefix}hash_indexes.{spec.name}.{name}" for name in state.EVERY_NAME}
        saved = {name: self._saved[keys[name]] for name in state.state_names(spec.hashing) if keys[name] in self._saved}
        if self._group is not None:
            self.taken.extend(name for name in keys.values() if name in self._saved)
        if not state.has_index(saved):
            forgets = self._take_absent(local, weight is not None) or self._group is not None
            if weight is None:
                self.missing.update({keys[name]: spec.name for name in state.state_names(spec.hashing)})
            elif forgets and not isinstance(weight, ShardedTensor):
                rows, dim = spec.num_embeddings, spec.embedding_dim
                shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
                if len(shape) == 2 and shape[0] < rows and shape[1] == dim:
                    self.moves[spec.name] = RowMove.keep_first(shape[0])  # which stay
                check_shape(key, weight, saved_shape(rows, dim, self.moves.get(spec.name)))
        else:
            if weight is None:
                raise CheckpointError(
                    "The state has the index but not the weight of its table: ids would find the rows of other ids.",
                    reason="torn_state",
                    module_path=spec.name,
                    what_to_do="Load the index together with the weight, or leave out the keys of both.",
                )
            pieces = self._indexes(table, saved, weight)
            if self._group is not None or spec.name in self.moves:
                for shard, piece in pieces.items():
                    start = f"{self._prefix}hash_indexes.{shard.name}."
                    self.local.update({f"{start}{name}": value for name, value in piece.items()})

    def _take_absent(self, local: Sequence[Shard], has_weight: bool) -> bool:
        """Say what the indexes do without a saved one; whether one of them forgets its ids."""
        forgets = False
        for shard in local:
            keeps = not has_weight or (self._store.index(shard.name).holds_ids() and not STRICT.get())
            what = state.KEEP if keeps else state.FORGET
            self.local[f"{self._prefix}hash_indexes.{shard.name}.{state.ABSENT}"] = what
            forgets |= what == state.FORGET
        return forgets

    def _indexes(self, table: ShardedTable, saved: Mapping[str, Any], weight: Any) -> dict[Shard, dict[str, Any]]:
        spec, path = table.table, f"{self._prefix}hash_indexes.{table.table.name}"
        values = [weight, *(value for name, value in saved.items() if name not in state.NOT_BY_ROW)]
        if self._group is None or not any(isinstance(value, ShardedTensor) for value in values):
            pieces, move = fit_whole_index(self._store, self._sharding.local_of(spec.name), spec, saved, weight)
            self.moves.update({} if move is None else {spec.name: move})
            return pieces
        if table.is_replicated or not all(isinstance(value, ShardedTensor) for value in values):
            raise other_plan(_CUT_OTHERWISE, path)
        assert spec.hashing is not None
        check_identity(spec.hashing, spec.name, saved.get(IDENTITY))
        cut = {name: value for name, value in saved.items() if isinstance(value, ShardedTensor)}
        parts = {name: self._parts(table, value, name, f"{path}.{name}") for name, value in cut.items()}
        whole = {name: value for name, value in saved.items() if name not in cut}  # the same on all ranks
        if counts := parts.pop(COUNTS, None):
            whole[COUNTS] = torch.cat(list(counts.values()))
        return fit_cut_index(
            self._store, table, self._sharding.rank, whole, parts, lambda name, piece: parts[name][piece]
        )

    def _parts(self, table: ShardedTable, saved: ShardedTensor, name: str, key: str) -> dict[Piece, Tensor]:
        """This rank's parts of a ``ShardedTensor``: the weight, or a tensor of the index (``other_plan``)."""
        assert self._group is not None
        pieces = weight_pieces(table) if name == "weight" else index_pieces(table, name, self._sharding.rank)
        return parts_of(saved, pieces, self._group, key)


_CUT_OTHERWISE = "the state is cut in a different way than this table."


# Saving


def save_sharded_state(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """A state dict hook that replaces this rank's shards with whole tables: ``ShardedTensor``s whose local shards are
    views, so that ``torch.distributed.checkpoint`` loads in place; replicated tensors are plain. No rank knows what the
    others have counted: if rows are cut, statistics are in ``slice_counts``, as they were when ``state_dict`` was
    called, and those in ``counts`` are 0.
    """
    if not module.is_sharded:  # it has been sharded, and shares its hooks with what took its place
        return
    shards = {shard.name for shard in module.sharding.local()}
    kind = kind_of(module)
    for start in (f"{prefix}{kind.tables}.", f"{prefix}hash_indexes."):
        of_tables = [key for key in state_dict if key.startswith(start)]
        for key in [key for key in of_tables if key[len(start) :].partition(".")[0] in shards]:
            del state_dict[key]
    for table in module.sharding.tables:
        state_dict[prefix + kind.weight_name("", table.table.name)] = _weight(module, table)
    for table in module.sharding.tables:
        if table.table.has_index:
            for name, value in _index_state(module, table).items():
                state_dict[f"{prefix}hash_indexes.{table.table.name}.{name}"] = value


def _weight(module: Any, table: ShardedTable) -> Tensor:
    store, group = module.store, module.groups.pooled
    if table.is_replicated:
        return store.weight(table.table.name).detach()
    local = [store.weight(piece.shard.name).dtype for piece in own_pieces(weight_pieces(table), group.rank())]
    dtype = local[0] if local else module.dtypes[table.table.name]
    return make_sharded_tensor(weight_pieces(table), lambda piece: store.weight(piece.shard.name), dtype, group)


def _index_state(module: Any, table: ShardedTable) -> dict[str, Tensor]:
    store, group, config = module.store, module.groups.pooled, table.table.hashing
    assert config is not None
    whole = whole_index(table.table)
    counted = {} if table.is_replicated else _counted(module, table)
    saved: dict[str, Tensor] = {}
    for name in state.state_names(config):
        if table.is_replicated:
            saved[name] = getattr(store.index(table.table.name), name)
        elif name == IDENTITY:
            local = module.sharding.local_of(table.table.name)
            saved[name] = store.index(local[0].name).identity if local else identity(config, table.table.name)
        else:

            def tensor_of(piece: Piece, name: str = name) -> Tensor:
                tensor: Tensor = getattr(store.index(piece.shard.name), name)
                of_slice = counted.get(piece.shard.name)
                if of_slice is not None and name == SLICE_COUNTS:
                    return of_slice.of_parts
                if of_slice is not None and name == COUNTS and piece.offsets != (0,):
                    return of_slice.of_table
                return piece.of(tensor) if name == COUNTS else tensor

            pieces = index_pieces(table, name, group.rank())
            saved[name] = make_sharded_tensor(pieces, tensor_of, getattr(whole, name).dtype, group)
    return saved


def _counted(module: Any, table: ShardedTable) -> dict[str, SliceCounts]:
    """What this rank's slices of a table have counted, by shard; a slice that is the whole table says it itself."""
    rank, counted = module.sharding.rank, dict[str, SliceCounts]()
    for shard in table.slices(table.filled, rank):
        index = module.store.index(shard.name) if shard.rank == rank else None
        if index is not None and not index.policy.is_whole_table:
            counted[shard.name] = index.counts_to_save(next(iter(counted.values()), None))
    return counted


def drop_shard_names(module: Any, incompatible_keys: Any) -> None:
    """A hook after loading that reports missing keys by table."""
    if not module.is_sharded:
        return
    others = [shard.name for shard in module.sharding.local() if shard.name != shard.table.name]
    tables = kind_of(module).tables
    names = tuple(f"{part}.{name}." for name in others for part in (tables, "hash_indexes"))
    missing: list[str] = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not any(name in key for name in names)]
