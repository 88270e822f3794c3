"""What a converted collection does with a saved state before any of it is loaded: check it, and fit it to its rows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import Tensor, nn

from recfx.errors import CheckpointError
from recfx.hashing import state
from recfx.hashing.row_move import RowMove, check_saved_index, fit_rows, saved_names
from recfx.modules.converted_collection import ConvertedCollection


def fit_state(
    collection: ConvertedCollection, saved: Mapping[str, object], prefix: str, *, hooked: bool = False
) -> tuple[dict[str, object], dict[str, RowMove]]:
    """Check the saved indexes of a collection and fit what was saved with fewer rows. Changes nothing.

    Args:
        collection: the one that is to load.
        saved: a state, also of a bigger model.
        prefix: of the collection's keys in it.
        hooked: also look at indexes with load hooks, which may still rename keys; such an index checks itself.

    Returns:
        index state that takes the place of the saved one, by key (``state.ABSENT`` for what an index without any is to
        do); and where the rows of the tables move, by table name, for tables that have more rows now.

    Raises:
        CheckpointError: what is wrong with an index, or ``torn_state`` where its table's weight is missing or does not
            fit it.
    """
    fitted: dict[str, object] = {}
    moves: dict[str, RowMove] = {}
    start = f"{prefix}embedding_bags."
    bags_saved = {key[len(start) :].split(".", 1)[0] for key in saved if key.startswith(start)}
    for table in collection.tables:
        if not table.has_index:
            continue
        index = collection.index(table.name)
        keys = {name: f"{prefix}hash_indexes.{table.name}.{name}" for name in saved_names(index)}
        found = {name: saved[key] for name, key in keys.items() if key in saved}
        weight = saved.get(f"{prefix}embedding_bags.{table.name}.weight")
        # Under any name below its bag: a parametrization has others.
        has_weight = weight is not None or table.name in bags_saved or _weight_may_be_renamed(collection, table.name)
        if not state.has_index(found):
            what = state.KEEP if not has_weight or (index.holds_ids() and not is_strict()) else state.FORGET
            fitted[f"{prefix}hash_indexes.{table.name}.{state.ABSENT}"] = what
        if index._load_state_dict_pre_hooks and not hooked:
            continue
        if not state.has_index(found):
            fits = isinstance(weight, Tensor) and fits_first_rows(weight, collection.weight(table.name))
            if isinstance(weight, Tensor) and fits and what == state.FORGET:
                moves[table.name] = RowMove.keep_first(weight.shape[0])  # of the table before it grew
            continue
        if not has_weight:
            raise without_weight(index.name)
        check_weight(index.name, found.get("row_ids"), weight, collection.weight(table.name))
        fitted_index, move = fit_rows(index, found)
        check_saved_index(index, fitted_index)
        if move is not None:
            fitted.update({keys[name]: value for name, value in fitted_index.items()})
            moves[table.name] = move
    return fitted, moves


def moved_weight(saved: Tensor, weight: Tensor, move: RowMove, path: str) -> Tensor:
    """The saved rows where they are now, between the rows that ``weight`` has: a new ``[rows, dim]`` tensor.

    Raises:
        CheckpointError: ``rows_mismatch``, if ``weight`` is on meta: there are no rows to put between.
    """
    if weight.is_meta:
        raise CheckpointError(
            f"The saved table has {saved.shape[0]} rows, this one {weight.shape[0]}, and it is on the meta device.",
            reason="rows_mismatch",
            module_path=path,
            what_to_do="Call to_empty() and reset_parameters() first.",
        )
    return move.apply(saved, weight.detach().to(saved.device, saved.dtype, copy=True))


def _weight_may_be_renamed(collection: ConvertedCollection, table: str) -> bool:
    """Whether a user's hook may find the weight under another name."""
    bag = collection.embedding_bags[table]
    return bool(bag._load_state_dict_pre_hooks or collection.embedding_bags._load_state_dict_pre_hooks)


def is_strict() -> bool:
    """What the ``load_state_dict`` that is running was called with: torch does not tell the modules."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is nn.Module.load_state_dict.__code__:
            return bool(frame.f_locals["strict"])
        frame = frame.f_back
    return True


def without_weight(name: str) -> CheckpointError:
    """The error for an index without its table."""
    return CheckpointError(
        "The state has the index, but not the weight of its table: ids would find rows of others.",
        reason="torn_state",
        module_path=name,
        what_to_do="Load the index together with the weight, or leave the keys of both out.",
    )


def check_weight(name: str, row_ids: object, saved: object, weight: Tensor) -> None:
    """An index goes with its table's rows: torch would load it and only then complain about the weight."""
    if not isinstance(saved, Tensor) or not isinstance(row_ids, Tensor):
        return
    if saved.dim() != 2 or saved.shape[0] != row_ids.numel():
        raise CheckpointError(
            f"The saved index has {row_ids.numel()} rows, the saved weight the shape {tuple(saved.shape)}.",
            reason="torn_state",
            module_path=name,
            what_to_do="The saved state is damaged: use another one.",
        )
    if saved.shape[1] != weight.shape[1]:
        raise CheckpointError(
            f"The saved rows have {saved.shape[1]} columns, those of this table {weight.shape[1]}.",
            reason="columns_mismatch",
            module_path=name,
            what_to_do="Build the table with the embedding_dim that it was saved with.",
        )


def fits_first_rows(saved: Tensor, weight: Tensor) -> bool:
    """Whether a saved weight is that of this table before it had more rows."""
    return saved.dim() == 2 and saved.shape[0] < weight.shape[0] and saved.shape[1] == weight.shape[1]
