"""Which saved rows and which saved index fit a table: the one place that decides this, for every way of loading.

``load_state_dict`` of unsharded and sharded collections and checkpoints ask here, with what they have: whole tensors,
or only the shapes of what they will read later. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar

from torch import Tensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.errors import CheckpointError
from recfx.hashing import HashIndex, state
from recfx.hashing.row_move import RowMove, check_saved_index, fit_rows, saved_names
from recfx.hashing.storage import say_what_is_lost
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
    check_saved_index(index, buffers)
    return buffers, move


def without_index(*, has_weight: bool, holds_ids: Callable[[], bool]) -> str:
    """What an index does if nothing was saved for it, ``state.KEEP`` or ``state.FORGET``."""
    return state.KEEP if not has_weight or (holds_ids() and not STRICT.get()) else state.FORGET


def say_what_is_lost_together(fitted: dict[str, object], indexes: Mapping[str, HashIndex]) -> None:
    """Say once for several indexes what they would each say that load a state without one.

    Args:
        fitted: the state to load, by key; changed so that the indexes do not say it again.
        indexes: by the start of their keys. One with load hooks may find itself in the state after all, and says it.
    """
    absent = {f"{prefix}{state.ABSENT}": index for prefix, index in indexes.items() if not load_hooks(index)}
    forgetting = {key: index for key, index in absent.items() if fitted.get(key) == state.FORGET}
    say_what_is_lost(list(forgetting.values()))
    fitted.update(dict.fromkeys(forgetting, state.FORGET_AS_SAID))


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


# The tables of an unsharded collection


def fit_state(
    collection: ConvertedCollection, saved: Mapping[str, object], prefix: str
) -> tuple[dict[str, object], dict[str, RowMove]]:
    """Check the saved indexes of a collection and fit what was saved with fewer rows.

    An index with load hooks, which may still rename keys, checks itself.

    Args:
        saved: a state, possibly of a larger model.

    Returns:
        index state that replaces the saved one, by key (``state.ABSENT`` says what an index is to do for which nothing
        was saved); and where the rows of the tables move, by table name, for tables that have more rows now.

    Raises:
        CheckpointError: what is wrong with an index, or ``torn_state`` or ``shape_mismatch`` if its table's weight is
            missing or does not fit it.
    """
    fitted: dict[str, object] = {}
    moves: dict[str, RowMove] = {}
    kind = kind_of(collection)
    start, tables = f"{prefix}{kind.tables}.", kind.tables_of(collection)
    bags_saved = {key[len(start) :].split(".", 1)[0] for key in saved if key.startswith(start)}
    for name in collection.tables_with_index():
        index, (rows, dim) = collection.index(name), collection.weight(name).shape
        keys = {buffer: f"{prefix}hash_indexes.{name}.{buffer}" for buffer in saved_names(index)}
        saved_index = {buffer: saved[key] for buffer, key in keys.items() if key in saved}
        key = prefix + kind.weight_name("", name)
        weight = saved.get(key)
        # Any name below its bag will do, because a parametrization changes the name, and so may a hook of the user's.
        has_weight = name in bags_saved or bool(load_hooks(tables[name]) or load_hooks(tables))
        what = ""
        if not state.has_index(saved_index):
            what = without_index(has_weight=has_weight, holds_ids=index.holds_ids)
            fitted[f"{prefix}hash_indexes.{name}.{state.ABSENT}"] = what
        if load_hooks(index):
            continue
        move: RowMove | None = None
        if what == state.FORGET:
            move = first_rows(weight, rows, dim)
            check_shape(key, weight, saved_shape(rows, dim, move))
        elif not what:
            if not has_weight:
                raise without_weight(index.name)
            buffers, move = fit_index(index, saved_index, weight, dim)
            fitted.update({} if move is None else {keys[buffer]: value for buffer, value in buffers.items()})
        if move is not None:
            moves[name] = move
    return fitted, moves


def fit_weights(
    collection: ConvertedCollection, saved: Mapping[str, object], prefix: str, moves: Mapping[str, RowMove]
) -> dict[str, Tensor]:
    """The saved weights whose rows move, as new ``[rows, dim]`` tensors, by key; rows that are not saved stay."""
    fitted = {}
    for table, move in moves.items():
        key, weight = prefix + kind_of(collection).weight_name("", table), collection.weight(table)
        saved_weight = saved.get(key)
        if not isinstance(saved_weight, Tensor):
            continue
        if weight.is_meta:
            raise CheckpointError(
                f"The saved table has {saved_weight.shape[0]} rows, this one has {weight.shape[0]} and is on the meta "
                "device.",
                reason="rows_mismatch",
                module_path=prefix + table,
                what_to_do="Call to_empty() and reset_parameters() first.",
            )
        fitted[key] = move.apply(saved_weight, weight.detach().to(saved_weight.device, saved_weight.dtype, copy=True))
    return fitted
