"""What the tables of an unsharded collection take from a saved state."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.fit_table import (
    check_shape,
    first_rows,
    fit_index,
    saved_shape,
    without_index,
    without_weight,
)
from recfx.collections.kinds import kind_of
from recfx.errors import CheckpointError
from recfx.hashing import state
from recfx.hashing.row_move import RowMove, saved_names
from recfx.runtime.base import load_hooks


def fit_state(
    collection: ConvertedCollection, saved: Mapping[str, object], prefix: str, *, hooked: bool = False
) -> tuple[dict[str, object], dict[str, RowMove]]:
    """Check the saved indexes of a collection and fit what was saved with fewer rows. Changes nothing.

    Args:
        saved: a state, possibly of a larger model.
        hooked: also look at indexes with load hooks, which may still rename keys; such an index checks itself.

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
    start = f"{prefix}{kind.tables}."
    bags_saved = {key[len(start) :].split(".", 1)[0] for key in saved if key.startswith(start)}
    for table in collection.tables:
        if not table.has_index:
            continue
        index, (rows, dim) = collection.index(table.name), collection.weight(table.name).shape
        keys = {name: f"{prefix}hash_indexes.{table.name}.{name}" for name in saved_names(index)}
        saved_index = {name: saved[key] for name, key in keys.items() if key in saved}
        key = prefix + kind.weight_name("", table.name)
        weight = saved.get(key)
        # Any name below its bag will do, because a parametrization changes the name.
        has_weight = weight is not None or table.name in bags_saved or _weight_may_be_renamed(collection, table.name)
        if not state.has_index(saved_index):
            what = without_index(has_weight=has_weight, holds_ids=index.holds_ids)
            fitted[f"{prefix}hash_indexes.{table.name}.{state.ABSENT}"] = what
        if load_hooks(index) and not hooked:
            continue
        if not state.has_index(saved_index):
            if what == state.FORGET:
                move = first_rows(weight, rows, dim)
                check_shape(key, weight, saved_shape(rows, dim, move))
                moves.update({} if move is None else {table.name: move})
            continue
        if not has_weight:
            raise without_weight(index.name)
        buffers, move = fit_index(index, saved_index, weight, dim)
        if move is not None:
            fitted.update({keys[name]: value for name, value in buffers.items()})
            moves[table.name] = move
    return fitted, moves


def fit_weights(
    collection: ConvertedCollection, saved: Mapping[str, object], prefix: str, moves: Mapping[str, RowMove]
) -> dict[str, Tensor]:
    """The saved weights whose rows move, as new ``[rows, dim]`` tensors, by key; rows that are not saved stay.

    Raises:
        CheckpointError: ``rows_mismatch`` if the table is on meta and so has no rows to put the saved ones between.
    """
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


def _weight_may_be_renamed(collection: ConvertedCollection, table: str) -> bool:
    """Whether a user's hook may find the weight under another name."""
    tables = kind_of(collection).tables_of(collection)
    return bool(load_hooks(tables[table]) or load_hooks(tables))
