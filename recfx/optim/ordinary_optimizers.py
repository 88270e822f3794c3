"""Optimizers that step a table by the gradient of its weight: a row that goes to a new id starts anew in them as well.

Torch calls a hook before each step of any optimizer, which is how those of a table become known.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary
from torchrec.optim.keyed import KeyedOptimizer

from recfx.errors import ConversionError
from recfx.hashing import HashIndex
from recfx.kernels.step.row_initialization import StateOfRows
from recfx.optim.rules import class_names

_Starts = dict[str, float]
"""What a row of each state begins with."""


class OrdinaryOptimizers:
    """The optimizers that have stepped one table, apart from fused ones, and which rows have gone to new ids since.

    A row that goes to a new id has, in every optimizer, what a state begins with. It is set when the row is given out,
    and again before the step: a state may have been loaded in between. A row that no id had has another state if weight
    decay steps it, which is reset where it can be; nothing else is refused for it. ``weight`` gives the table's weight,
    None if there is none any more; ``given`` is what ``since_last_step`` returned of the object that this one is a copy
    of.
    """

    def __init__(
        self,
        collection: str,
        table: str,
        index: HashIndex,
        weight: Callable[[], Tensor | None],
        given: tuple[Tensor | None, int, bool] = (None, 0, False),
    ) -> None:
        self.weight = weight
        self._collection, self._table, self._index = collection, table, index
        self._starts: WeakKeyDictionary[torch.optim.Optimizer, _Starts] = WeakKeyDictionary()
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()
        # bool, by row, on the CPU: whether it has gone to a new id since a step or a load of the index
        self._given, self._loads, self._has_renewed = given
        _watch_steps()
        _NEW.add(self)

    def since_last_step(self) -> tuple[Tensor | None, int, bool]:
        """For a copy: the rows given out since the last step, loads of the index, and whether any had another id."""
        return self._given, self._loads, self._has_renewed

    def give_out(self, weight: Tensor, rows: Tensor, have_renewed: bool) -> None:
        """Reset what is known of int64 ``[n]`` rows that go to new ids: states, and a gradient that waits for a step.
        ``have_renewed``: whether any of them has belonged to another id.
        """
        self._has_renewed |= have_renewed
        _TABLES.setdefault(weight, WeakSet()).add(self)
        if self._given is None or self._given.shape != weight.shape[:1] or self._has_loaded():
            self._given = torch.zeros(weight.shape[0], dtype=torch.bool, device="cpu")
            self._loads = self._index.adopted.times
        self._given[rows.cpu()] = True
        states = [] if weight.grad is None else [StateOfRows(weight.grad.detach(), 0.0)]
        for optimizer, starts in list(self._starts.items()):
            states += _states_of_rows(optimizer.state.get(weight, {}), starts)
        _reset(states, rows)

    def _has_loaded(self) -> bool:
        """Whether a state was loaded since ids got rows; optimizers may have loaded one that belongs to it."""
        return self._loads != self._index.adopted.times

    def before_step(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: Tensor) -> None:
        """Reset what ``optimizer`` has of rows that went to new ids since the last step."""
        given = None if self._has_loaded() else self._given
        is_renewed = self._index.config.evicts or (given is not None and self._has_renewed)
        if not is_renewed and (given is None or not group.get("weight_decay")):
            return
        try:
            starts = self._checked_starts(optimizer, group, weight)
        except ConversionError:
            if is_renewed:
                raise
            return
        states = _states_of_rows(optimizer.state.get(weight, {}), starts)
        is_later = given is not None and bool(self._stepped) and optimizer not in self._stepped
        if is_later and any(bool((tensor != value).any()) for tensor, value in states):
            raise self._refused(
                optimizer,
                "has a state that may be older than the steps of another optimizer of the table",
                "call step() of each optimizer right after its state was loaded, while there are no gradients; if this "
                "optimizer replaces another, delete that one first.",
            )
        if states and given is not None and bool(given.any()):
            _reset(states, torch.nonzero(given).squeeze(1))
        self._starts[optimizer] = starts

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that ``optimizer`` has stepped the rows as their ids have them now."""
        self._stepped.add(optimizer)
        if self._given is not None:
            self._given.zero_()

    def _checked_starts(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: Tensor) -> _Starts:
        state, starts = optimizer.state.get(weight, {}), self._starts.get(optimizer)
        if starts is None or any(name not in starts and not _is_number(value) for name, value in state.items()):
            starts = self._starts_of(optimizer, group, weight)
        for name, value in state.items():
            self._check(optimizer, name, value, name in starts and value.shape[:1] == weight.shape[:1])
        return starts

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
        if not (is_of_rows or _is_number(value)):
            raise self._refused(optimizer, f"has a state {name!r} that is neither a number nor one of the rows alone")

    def _refused(
        self,
        optimizer: torch.optim.Optimizer,
        why: str,
        what_to_do: str = "step it by an optimizer whose states begin with one number for every row, such as SGD, "
        f"Adagrad and Adam, without a wrapper; or attach {class_names()} to the table's parameter with torchrec's "
        "apply_optimizer_in_backward.",
    ) -> ConversionError:
        return ConversionError(
            f"table {self._table!r} gives rows to new ids, and its {type(optimizer).__name__} {why}: what it has "
            "of a row would carry over to the row's next id.",
            reason="evict_needs_fused_optimizer",
            module_path=self._collection,
            what_to_do=what_to_do,
        )


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float | None)


def _states_of_rows(state: Mapping[str, Any], starts: _Starts) -> list[StateOfRows]:
    return [StateOfRows(state[name], value) for name, value in starts.items() if state.get(name) is not None]


def _reset(states: Iterable[StateOfRows], rows: Tensor) -> None:
    for tensor, value in states:
        tensor.index_fill_(0, rows.to(tensor.device), value)


_TABLES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By weight, the tables that it is of; several collections may share one."""
_NEW: WeakSet[OrdinaryOptimizers] = WeakSet()
"""Tables that are not in ``_TABLES`` yet."""


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def reset_before_saving(optimizer: torch.optim.Optimizer) -> None:
    """Reset what an optimizer, which may not have stepped yet, has of rows that went to new ids, before it is saved."""
    for table, group, weight in _tables_of(optimizer):
        table._index.refresh()
        if optimizer.state.get(weight):
            table.before_step(optimizer, group, weight)


def _before_step(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    for table, group, weight in _tables_of(optimizer):
        table.before_step(optimizer, group, weight)


def _after_step(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    for table, _, _ in _tables_of(optimizer):
        table.after_step(optimizer)


def _tables_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[OrdinaryOptimizers, Mapping[str, Any], Tensor]]:
    """The tables that ``optimizer`` steps, each with its group and its weight."""
    for table in list(_NEW):  # not `pop`: those that are left may be gone
        _NEW.discard(table)
        if (weight := table.weight()) is not None:
            _TABLES.setdefault(weight, WeakSet()).add(table)
    if not _TABLES or isinstance(optimizer, KeyedOptimizer):  # those that it consists of step as well
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.requires_grad and not weight.is_meta:
                for table in list(_TABLES.get(weight, ())):
                    if table.weight() is weight:
                        yield table, group, weight
