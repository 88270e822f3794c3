"""Loads a checkpoint into a model: checks and plans first, then carries out the plan.

Indexes and small tensors are read into separate memory, checked, and loaded with ``load_state_dict``. Large weights
would not fit into memory twice: they are read in place, once everything else is known to be right.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from recfx.checkpoint.contents import (
    MODEL,
    check_has_elements,
    check_loadable,
    check_saved_as,
    mismatch,
    with_prefix,
)
from recfx.checkpoint.sharded import IN_PLACE_BYTES, TablePlan, plan_tables
from recfx.checkpoint.storage import SavedFolder
from recfx.checkpoint.table_names import (
    check_index_sizes,
    fit_names,
    sharded_names,
    sharded_tables,
    table_prefixes,
)
from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import collections_by_prefix
from recfx.collections.fit_table import saved_shape
from recfx.collections.kinds import kind_of
from recfx.collections.whole_tables import fit_state
from recfx.hashing.index import HashIndex
from recfx.hashing.row_move import RowMove

_EXTRA_STATE = "_extra_state"  # torch's name for what modules save by themselves; it may have any shape


@dataclass
class ModelPlan:
    """What is to be done to one model.

    Args:
        model: the model without wrappers.
        folder: the data folder.
        state: the state for ``load_state_dict``; tensors that are read in place are the model's own.
        in_place: tensors of the model to read into, by name.
        moves: where the rows of tables that have more rows than saved go, by weight name.
        described: shapes and dtypes of what is saved, by name in the model.
        tables: this rank's parts of sharded tables.
        prefix: what the model's names begin with in the folder.
    """

    model: nn.Module
    folder: SavedFolder
    state: dict[str, Any]
    in_place: dict[str, Tensor]
    moves: dict[str, RowMove]
    described: dict[str, Tensor]
    tables: list[TablePlan]
    prefix: str

    @property
    def all_moves(self) -> dict[str, RowMove]:
        """The moves of all tables, sharded ones included."""
        sharded = {plan.table.weight: plan.move for plan in self.tables if plan.move is not None}
        return {**self.moves, **sharded}

    def begin(self, done: list[Callable[[], None]]) -> None:
        """Give modules their extra states, which their own code loads.

        Args:
            done: gets the functions that undo it.

        Raises:
            CheckpointError: ``checkpoint_mismatch``.
        """
        for path, module in self.model.named_modules():
            name = f"{path}." * bool(path) + _EXTRA_STATE
            if name not in self.state or type(module).set_extra_state is nn.Module.set_extra_state:
                continue
            done.append(functools.partial(module.set_extra_state, copy.deepcopy(module.get_extra_state())))
            with refused_as(f"the {type(module).__name__}", path):
                module.set_extra_state(self.state[name])

    def carry_out(self) -> None:
        """Load the rest. Everything has been checked; what can still fail is the disk."""
        for _, collection in collections_by_prefix(self.model, UnshardedCollection):
            for name in collection.hash_indexes:
                collection.index(name).expect_load()
        self.folder.read_into({self.prefix + name: tensor for name, tensor in self.in_place.items()})
        for name, move in self.moves.items():
            (saved,) = self.folder.read([self.prefix + name]).values()
            move.apply(saved, self.state[name])
        self.model.load_state_dict(self.state, strict=not self.tables)  # sharded tables are not in it
        for table in self.tables:
            table.expect_load()
        for table in self.tables:
            table.carry_out(self.folder)


@contextlib.contextmanager
def refused_as(subject: str, module_path: str) -> Iterator[None]:
    """Turn errors that foreign code raises about saved values into a ``CheckpointError``."""
    try:
        yield
    except Exception as error:
        raise mismatch(
            f"{subject} does not accept what was saved ({type(error).__name__}: {error}).",
            module_path=module_path,
        ) from error


def plan_model(
    model: nn.Module,
    folder: SavedFolder,
    described: Mapping[str, Tensor],
    extra_state: Mapping[str, Any],
    start: str = MODEL,
) -> ModelPlan:
    """Check the saved model, whose names begin with ``start``, against this one. Changes nothing.

    Raises:
        CheckpointError: ``checkpoint_mismatch``, ``model_on_meta``, or what is wrong with an index.
    """
    saved = with_prefix(described, start)
    state = _state_of(model)
    whole_tables = table_prefixes(model)
    index_keys = set().union(*whole_tables.values())
    names, saved = fit_names(model, state, saved, extra_state)
    _check_where(state, saved, extra_state)
    sharded = sharded_names(model)
    state = {name: state[name] for name in names if name not in sharded}
    check_has_elements(state, "is on the meta device", "call to_empty(device=...) before loading.")
    for prefix, collection in collections_by_prefix(model, UnshardedCollection):
        for table in collection.hash_indexes:
            check_index_sizes(saved, whole_tables[prefix, table], collection.index(table).policy.own_rows, table)
    index_state = _read_aside(folder, start, sorted(index_keys & saved.keys()))
    fitted, moves = _fit_indexes(model, {**saved, **index_state})
    index_state.update(fitted)
    for name, value in state.items():
        if isinstance(value, Tensor) and name not in index_keys and not name.endswith(_EXTRA_STATE):
            check_loadable(name, value)
            shape, move = tuple(value.shape), moves.get(name)
            check_saved_as(
                name, saved[name], value.dtype, shape, shape if move is None else saved_shape(shape[0], shape[1], move)
            )
    addresses = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    rest = [name for name in state if name in saved and name not in index_keys and name not in moves]
    own = [name for name in rest if not name.endswith(_EXTRA_STATE) and state[name].data_ptr() in addresses]
    in_place = {name: state[name] for name in own if _is_big(state[name])}
    state.update(_read_aside(folder, start, [name for name in rest if name not in in_place]))
    state.update(index_state)
    state.update(extra_state)
    return ModelPlan(model, folder, state, in_place, moves, saved, plan_tables(model, folder, saved), start)


def _state_of(model: nn.Module) -> dict[str, Any]:
    """The ``state_dict``, even after an interrupted load: names and shapes are right, and the rest will be loaded."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, HashIndex):
                stack.enter_context(module.readable())
        for table in sharded_tables(model):
            for index in table.local_indexes():
                stack.enter_context(index.readable())
        return model.state_dict()


def _check_where(state: Mapping[str, Any], saved: Collection[str], extra_state: Collection[str]) -> None:
    """Check that tensors were saved as tensors; only what modules save by themselves may be anything else."""
    for name, value in state.items():
        if name in saved and name in extra_state:
            raise mismatch(f"{name!a} is in the checkpoint twice.")
        if name.endswith(_EXTRA_STATE) or isinstance(value, Tensor) is (name not in extra_state):
            continue
        raise mismatch(f"{name!a} is a tensor on one side only.")


def _fit_indexes(model: nn.Module, saved: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, RowMove]]:
    fitted: dict[str, Any] = {}
    moves: dict[str, RowMove] = {}
    for prefix, collection in collections_by_prefix(model, UnshardedCollection):
        state, moved = fit_state(collection, saved, prefix, hooked=True)
        fitted.update(state)
        kind = kind_of(collection)
        moves.update({prefix + kind.weight_name("", table): move for table, move in moved.items()})
    return fitted, moves


def _read_aside(folder: SavedFolder, prefix: str, names: list[str]) -> dict[str, Tensor]:
    return with_prefix(folder.read([prefix + name for name in names]), prefix)


def _is_big(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= IN_PLACE_BYTES
