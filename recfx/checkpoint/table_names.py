"""The names in a checkpoint and in a model: which must be the same, which an index may have, and where a part is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from operator import itemgetter

from torch import Tensor, nn

from recfx.checkpoint.contents import BUILD_AS_SAVED, check_names, mismatch
from recfx.checkpoint.tables import tables_of
from recfx.collections.wrappers import without_wrappers
from recfx.errors import few
from recfx.hashing.identity import IDENTITY
from recfx.hashing.state import EVERY_NAME

_NEEDED = ("row_ids", "row_state", IDENTITY)
_OPTIONAL = tuple(name for name in EVERY_NAME if name not in _NEEDED)


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
    tables = [(table.prefix, table.name) for table in tables_of(model) if table.spec.has_index]
    _check_indexes_are_on_both_sides(model, saved)
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
    dots = [(name, place) for name in saved for place, letter in enumerate(name) if letter == "."]
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


def _check_indexes_are_on_both_sides(model: nn.Module, saved: Collection[str]) -> None:
    """Refuse converted tables that have an index on one side only: without it, the rows of ids mean nothing.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    for table in tables_of(model):
        was_saved = f"{table.prefix}hash_indexes.{table.name}.row_ids" in saved
        if table.weight not in saved or was_saved == table.spec.has_index:
            continue
        if was_saved:
            message = f"the checkpoint has an index for table {table.name!r}, which has no index here."
            what_to_do = "convert with hashing=HashConfig.raw_ids(...) as when saving."
        else:
            message = f"table {table.name!r} was saved without an index, but has one here."
            what_to_do = "convert with hashing=HashConfig() as when saving, or load the plain state with "
            what_to_do += "load_state_dict, which empties the index."
        raise mismatch(message, module_path=table.prefix.rstrip("."), what_to_do=what_to_do)
