"""Optimizers that step a table by the gradient of its weight: a row that goes to a new id starts anew in them as well.

Torch calls a hook before each step of any optimizer, which is how those of a table become known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchrec.optim.keyed import KeyedOptimizer

from recfx.errors import ConversionError
from recfx.hashing import HashIndex
from recfx.kernels.step.row_initialization import StateOfRows
from recfx.optim.rules import class_names

_Starts = dict[str, float]
"""What a row of each state begins with."""


class OrdinaryOptimizers:
    """The optimizers that have stepped one table, apart from fused ones, and the rows that ids got since the last step.

    Args:
        collection: fully qualified name of the collection, for messages.
        table: the name of the table.
        index: its index.
        weight: gives its weight; None if there is none any more.
    """

    def __init__(self, collection: str, table: str, index: HashIndex, weight: Callable[[], Tensor | None]) -> None:
        self.weight = weight
        self._collection, self._table, self._index = collection, table, index
        self._starts: WeakKeyDictionary[torch.optim.Optimizer, _Starts] = WeakKeyDictionary()
        self._given: Tensor | None = None  # bool, by row: for optimizers that have yet to step, and may have a state
        self._loads = 0
        _watch_steps()
        _WATCHED.add(self)

    def states_of_rows(self, weight: Tensor) -> tuple[StateOfRows, ...]:
        """What is to be set where a row goes to a new id: states, and a gradient that waits for a step."""
        if self._given is None or self._given.device != weight.device or self._has_loaded():
            self._given = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)
            self._loads = self._index.adopted.times
        states = [StateOfRows(self._given, 1.0)]
        if weight.grad is not None:
            states.append(StateOfRows(weight.grad.detach(), 0.0))
        for optimizer, starts in list(self._starts.items()):
            states += _states_of_rows(optimizer.state.get(weight, {}), starts)
        return tuple(states)

    def _has_loaded(self) -> bool:
        """Whether a state was loaded since ids got rows; optimizers may have loaded one that belongs to it."""
        return self._loads != self._index.adopted.times

    def before_step(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: Tensor) -> None:
        """Get to know ``optimizer``, and reset what it has of rows that went to new ids before.

        Raises:
            ConversionError: ``evict_needs_fused_optimizer``.
        """
        given = None if self._has_loaded() else self._given
        if given is None and not self._index.config.evicts:
            return
        state = optimizer.state.get(weight, {})
        starts = self._starts.get(optimizer)
        is_known = starts is not None
        starts = self._starts_of(optimizer, group, weight) if starts is None else starts
        for name, value in state.items():
            self._check(optimizer, name, value, name in starts and value.shape[:1] == weight.shape[:1])
        if given is not None and not is_known:
            rows = torch.nonzero(given).squeeze(1)
            for of_rows in _states_of_rows(state, starts):
                of_rows.tensor.index_fill_(0, rows.to(of_rows.tensor.device), of_rows.value)
        self._starts[optimizer], self._given = starts, None

    def _starts_of(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: Tensor) -> _Starts:
        """What states begin with, for rows of zeros. Those that begin as a copy of the rows are found by other rows,
        without weight decay, which changes states as well.
        """
        zeros = weight.new_zeros(weight.shape[1] + 1, weight.shape[1])  # not as many rows as columns
        others = torch.linspace(1, 2, zeros.numel(), device=zeros.device).view_as(zeros).to(zeros.dtype)
        states = self._first_states(optimizer, group, zeros)
        of_others = self._first_states(optimizer, {**group, "weight_decay": 0.0}, others)
        starts = {}
        for name, value in states.items():
            is_of_rows = isinstance(value, Tensor) and value.shape[:1] == zeros.shape[:1]
            begins_alike = is_of_rows and bool((value == value.flatten()[0]).all())
            self._check(optimizer, name, value, begins_alike and torch.equal(value, of_others[name]))
            if is_of_rows:
                starts[name] = float(value.flatten()[0])
        return starts

    def _first_states(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], values: Tensor
    ) -> dict[str, Any]:
        """The states after one step, without a gradient, of such an optimizer that is made anew for ``values``."""
        rows = nn.Parameter(values)
        rows.grad = torch.zeros_like(rows)
        try:
            arguments = inspect.signature(type(optimizer)).parameters.keys() - {"params"}
            fresh = type(optimizer)([rows], **{name: group[name] for name in arguments & group.keys()})
            fresh.step()
        except Exception as error:  # of the user's class
            raise self._refused(optimizer, f"cannot be made anew to see its state ({error})") from error
        return dict(fresh.state[rows])

    def _check(self, optimizer: torch.optim.Optimizer, name: str, value: object, is_of_rows: bool) -> None:
        is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float | None)
        if not (is_of_rows or is_number):
            raise self._refused(optimizer, f"has a state {name!r} that is neither a number nor one of the rows alone")

    def _refused(self, optimizer: torch.optim.Optimizer, why: str) -> ConversionError:
        return ConversionError(
            f"table {self._table!r} gives rows of ids to others, and its {type(optimizer).__name__} {why}: what it has "
            "of a row would carry over to the row's next id.",
            reason="evict_needs_fused_optimizer",
            module_path=self._collection,
            what_to_do="step it by an optimizer whose states begin with one number for every row, such as SGD, Adagrad "
            f"and Adam; or attach {class_names()} to the table's parameter with torchrec's "
            "apply_optimizer_in_backward.",
        )


def _states_of_rows(state: Mapping[str, Any], starts: _Starts) -> list[StateOfRows]:
    return [StateOfRows(state[name], value) for name, value in starts.items() if state.get(name) is not None]


_WATCHED: WeakSet[OrdinaryOptimizers] = WeakSet()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    if isinstance(optimizer, KeyedOptimizer):
        return  # those that it consists of step as well
    groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    for table in list(_WATCHED):
        weight = table.weight()
        if weight is not None and weight.requires_grad and not weight.is_meta and id(weight) in groups:
            table.before_step(optimizer, groups[id(weight)], weight)
