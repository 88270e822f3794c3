"""Loads a checkpoint into a model: checks and plans first, then carries out the plan.

Indexes, and what is not a tensor of the model itself, are read into separate memory and checked. Parameters would not
all fit into memory twice: they are read in place, one by one, once everything else is known to be right.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from recfx.checkpoint.contents import MODEL, check_has_elements, check_loadable, check_saved_as, mismatch, with_prefix
from recfx.checkpoint.storage import SavedFolder
from recfx.checkpoint.table_names import fit_names
from recfx.checkpoint.tables import TablePlan, plan_tables, tables_of
from recfx.hashing.row_move import RowMove

_EXTRA_STATE = "_extra_state"  # torch's name for what modules save by themselves; it may have any shape


@dataclass
class ModelPlan:
    """What is to be done to one model.

    Args:
        model: the model without wrappers.
        folder: the data folder.
        state: the state for ``load_state_dict``, without tables; tensors that are read in place are the model's own.
        in_place: tensors of the model to read into, by name in the folder.
        tables: this rank's parts of tables.
    """

    model: nn.Module
    folder: SavedFolder
    state: dict[str, Any]
    in_place: dict[str, Tensor]
    tables: list[TablePlan]

    @property
    def moves(self) -> dict[str, RowMove]:
        """Where the rows of tables that have more rows than saved go, by weight name."""
        return {plan.table.weight: plan.move for plan in self.tables if plan.move is not None}

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
        for table in self.tables:
            table.expect_load()
        self.folder.read_into(self.in_place)
        self.model.load_state_dict(self.state, strict=False)  # tables are not in it
        for table in self.tables:
            table.expect_load()  # once more, as load_state_dict says that indexes stay as they are
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


def plan_model(model: nn.Module, folder: SavedFolder, extra_state: Mapping[str, Any], start: str = MODEL) -> ModelPlan:
    """Check the saved model, whose names begin with ``start``, against this one. Changes nothing.

    Raises:
        CheckpointError: ``checkpoint_mismatch``, ``model_on_meta``, or what is wrong with an index.
    """
    with contextlib.ExitStack() as stack:  # even after an interrupted load, names and shapes are right
        for index in {index for table in tables_of(model) for index in table.indexes}:
            stack.enter_context(index.readable())
        state = model.state_dict()
    names, saved = fit_names(model, state, with_prefix(folder.described, start), extra_state)
    plans = plan_tables(model, folder, saved, start)
    of_tables = {key for table in tables_of(model) for key in (table.weight, *table.index_keys.values())}
    state = {name: state[name] for name in names if name not in of_tables}
    tensors = {name: value for name, value in state.items() if name not in extra_state}
    for name, value in tensors.items():
        if not name.endswith(_EXTRA_STATE):
            check_has_elements(name, [value])
            check_loadable(name, value)
            check_saved_as(name, saved[name], value.dtype, tuple(value.shape), tuple(value.shape))
    own = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    in_place = {
        start + name: value
        for name, value in tensors.items()
        if not name.endswith(_EXTRA_STATE) and value.data_ptr() in own
    }
    aside = folder.read([start + name for name in tensors if start + name not in in_place])
    state.update(with_prefix(aside, start))
    state.update(extra_state)
    return ModelPlan(model, folder, state, in_place, plans)
