"""Loads a checkpoint into a model: checks and plans first, then carries out the plan.

What is no table is read into separate memory and checked, and so are indexes. Weights of tables, and the state of fused
optimizers, would not all fit into memory twice: they are read in place, once everything else is known to be right.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from recfx.checkpoint.contents import (
    BUILD_AS_SAVED,
    MODEL,
    check_names,
    check_saved_as,
    check_tensor,
    mismatch,
    refused_as,
    with_prefix,
)
from recfx.checkpoint.storage import SavedFolder
from recfx.checkpoint.tables import Table, plan_tables, tables_of
from recfx.collections.wrappers import without_wrappers
from recfx.errors import Diagnostic, few
from recfx.hashing.identity import IDENTITY
from recfx.hashing.row_move import RowMove
from recfx.hashing.state import EVERY_NAME

_EXTRA_STATE = "_extra_state"  # torch's name for what modules save by themselves; it may have any shape
_OPTIONAL = tuple(name for name in EVERY_NAME if name not in ("row_ids", "row_state", IDENTITY))


class Plan:
    """What is to be done to load a checkpoint on this rank; everything has been checked."""

    def __init__(self) -> None:
        # What gives values to foreign code, which may refuse them: each adds to what it gets how it is undone.
        self.refusable: list[Callable[[contextlib.ExitStack], None]] = []
        self.rest: list[Callable[[], None]] = []  # loads everything else; what can still fail is the disk
        self.moves: dict[str, RowMove] = {}  # of tables that have more rows than saved, by weight name
        self.notes: list[Diagnostic] = []  # what the user should know about optimizers

    def load_refusable(self, undo: contextlib.ExitStack) -> None:
        for load in self.refusable:
            load(undo)

    def load_rest(self) -> None:
        with torch.no_grad():
            for load in self.rest:
                load()


def plan_model(model: nn.Module, folder: SavedFolder, extra_state: Mapping[str, Any], start: str = MODEL) -> Plan:
    """Check the saved model, whose names begin with ``start``, against this one without wrappers. Changes nothing."""
    tables, saved, plan = tables_of(model), with_prefix(folder.described, start), Plan()
    with contextlib.ExitStack() as stack:  # even after an interrupted load, names and shapes are right
        for index in {index for table in tables for index in table.indexes}:
            stack.enter_context(index.readable())
        state = model.state_dict()
    names = _loaded_names(tables, state, saved, extra_state)
    of_tables = plan_tables(tables, folder, saved, start)
    plan.moves = {of_table.table.weight: of_table.move for of_table in of_tables if of_table.move is not None}
    planned = {key for table in tables for key in (table.weight, *table.index_keys.values())}
    tensors = [name for name in names if name not in planned and name not in extra_state]
    for name in tensors:
        if not name.endswith(_EXTRA_STATE):
            check_tensor(name, state[name])
            shape = tuple(state[name].shape)
            check_saved_as(name, saved[name], state[name].dtype, shape, shape)
    loaded = {**with_prefix(folder.read([start + name for name in tensors]), start), **extra_state}

    def load_extra_states(undo: contextlib.ExitStack) -> None:
        for path, module in model.named_modules():
            name = f"{path}." * bool(path) + _EXTRA_STATE
            if name in loaded and type(module).set_extra_state is not nn.Module.set_extra_state:
                undo.callback(module.set_extra_state, copy.deepcopy(module.get_extra_state()))
                with refused_as(f"the {type(module).__name__}", path):
                    module.set_extra_state(loaded[name])

    def load() -> None:
        model.load_state_dict(loaded, strict=False)  # tables are not in it, and it says that indexes stay as they are
        for of_table in of_tables:
            of_table.expect_load()
        for of_table in of_tables:
            of_table.carry_out(folder)

    plan.refusable.append(load_extra_states)
    plan.rest.append(load)
    return plan


def _loaded_names(
    tables: list[Table], state: Collection[str], saved: Collection[str], extra_state: Collection[str]
) -> list[str]:
    """The names in the model's ``state_dict`` that are to be loaded; all of them, and no others, must be saved.

    Some keys of an index are needed under some policies only: an index loads without them, as
    ``state.buffers_from_state`` says, and does not use those that it does not need.
    """
    optional = {
        f"{table.prefix}hash_indexes.{table.name}.{name}"
        for table in tables
        for name in _OPTIONAL
        if table.spec.has_index
    }
    loaded = [name for name in state if name not in optional or name in saved]
    used = [name for name in saved if name not in optional or name in state]
    what_to_do = BUILD_AS_SAVED
    if any("hash_indexes." in name for name in {*loaded} ^ {*used}):
        what_to_do += " A table with an index is one that was converted with raw_ids() or dense_rows=0 when saving."
    if places := _places_of(loaded, saved):  # this model may be a part of the one that was saved
        place = places.most_common(1)[0][0]
        place = without_wrappers(place) or place
        what_to_do += f" To export a part of it, pass submodule={place!a} to recfx.export."
    check_names("", loaded, [*used, *extra_state], what_to_do)
    return loaded


def _places_of(names: Collection[str], saved: Collection[str]) -> Counter[str]:
    """The submodules that have names of a model: how many of ``names`` are among ``saved`` behind each path."""
    expected = set(names)
    dots = [(name, place) for name in saved for place, letter in enumerate(name) if letter == "."]
    return Counter(name[:dot] for name, dot in dots if name[dot + 1 :] in expected)


def prefix_of(submodule: str, names: Collection[str], saved: Collection[str]) -> str:
    """What the names of a submodule with the state ``names`` begin with in a checkpoint; wrappers may be left out."""
    places = _places_of(names, saved)
    alike = [path for path in places if without_wrappers(path) == without_wrappers(submodule)]
    if not alike and not any(name.startswith(f"{submodule}.") for name in saved):
        others = few([ascii(without_wrappers(path) or path) for path, _ in places.most_common(3)], 3)
        raise mismatch(
            f"the checkpoint has no submodule {submodule!a}.",
            module_path=submodule,
            what_to_do=f"pass one that has the parts of this model: {others}." if places else BUILD_AS_SAVED,
        )
    return f"{max(alike, key=places.__getitem__, default=submodule)}."
