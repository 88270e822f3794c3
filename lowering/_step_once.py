"""Fused optimizers step once per backward pass, when a table's whole gradient is known, like optimizers in backward.

If a lookup is called several times per step, or several lookups read one weight, the gradient comes from several nodes
of the autograd graph. The backward of each node leaves its part here. Autograd itself tells when all of them have run:
the lookups take a leaf as an argument, and the engine runs the leaf's ``AccumulateGrad`` once per backward pass, after
all nodes of that pass that lead to it. This also works with unused outputs, second backwards and activation
checkpointing.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from recfx.lowering._profiler_ranges import STEP, is_profiling, later_range, running_node
from recfx.optim.fused_optimizer import FusedOptimizer


class GradientPart(Protocol):
    """What one backward of a lookup leaves for the step.

    Attributes:
        lookup: the lookup that it belongs to.
        weights: the lookup's ``[rows, dim]`` tables.
        optimizers: the fused optimizer of each table.
    """

    lookup: StepOnce
    weights: list[torch.Tensor]
    optimizers: Sequence[Any]

    def of_table(self, table: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that the table's bags read, int64 ``[n]``, and their gradients, float32 ``[n, dim]``."""

    def step_with(self, parts: Sequence[Any]) -> None:
        """Step all tables with the sum of ``parts``: this one, and others of the same lookup and tables."""

    def step_shared(self, parts: Sequence[tuple[Any, tuple[int, ...]]]) -> bool:
        """Step these tables of ``parts`` in one call: of any lookups, and some may read the same weight.

        Returns:
            False, if the target cannot. Nothing has changed then.
        """


class _Left:
    """One part until the step has used it. The autograd node holds it, so that it is freed with the graph."""

    def __init__(self, part: GradientPart, triggers: int) -> None:
        self.part: GradientPart | None = part
        self.triggers = triggers  # how many have not stepped their tables yet


_Waiting = tuple[weakref.ref[_Left], tuple[int, ...]]


class Trigger:
    """Steps some tables when a backward pass has reached all lookups that read them.

    Attributes:
        leaf: an argument of every autograd node that reads these tables; an empty tensor that requires a gradient.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            place = "cpu" if device.type == "meta" else device
            self.leaf = torch.zeros(0, dtype=torch.float32, device=place, requires_grad=True)
            grad_fn: Any = self.leaf.view_as(self.leaf).grad_fn
        self._accumulate = grad_fn.next_functions[0][0]  # the tensor alone does not keep it alive
        this = weakref.ref(self)

        def reached(*gradients: Any) -> None:
            trigger = this()
            if trigger is not None:
                trigger._step()

        self._accumulate.register_hook(reached)
        self._waiting: dict[int, list[_Waiting]] = {}  # per backward pass
        self.users: weakref.WeakSet[StepOnce] = weakref.WeakSet()

    def leave(self, left: _Left, tables: tuple[int, ...]) -> None:
        """Called in a backward, to have ``tables`` of this part stepped."""
        waiting = self._waiting.setdefault(torch._C._current_graph_task_id(), [])
        waiting.append((weakref.ref(left), tables))
        if len(self._waiting) > _MANY:  # passes that failed, or that only computed other gradients
            for task, others in list(self._waiting.items()):
                if all(reference() is None for reference, _ in others):
                    del self._waiting[task]

    def _step(self) -> None:
        waiting = self._waiting.pop(torch._C._current_graph_task_id(), [])
        found = [(left, tables) for reference, tables in waiting if (left := reference()) is not None]
        parts = [(left.part, tables) for left, tables in found if left.part is not None]
        if parts:
            _step(parts)
        for left, _ in found:
            left.triggers -= 1
            if not left.triggers:
                left.part = None  # the graph may live longer


_MANY = 16
_triggers = WeakTensorKeyDictionary()  # weight -> Trigger; lookups that share a weight share its trigger


Triggers = list[tuple[Trigger, tuple[int, ...]]]  # each with the positions of the tables that it steps


class StepOnce:
    """The fused step of one lookup.

    Attributes:
        node: name of the graph node that ran the lookup last, if a profiler recorded it.
    """

    def __init__(self) -> None:
        self.node = ""
        self._weights: list[int] = []
        self._triggers: Triggers = []

    def triggers(self, weights: list[torch.Tensor]) -> Triggers:
        """The triggers that step the lookup's tables; its autograd node takes the leaf of each as an extra argument.

        Args:
            weights: the lookup's tables.
        """
        self.note_node()
        identities = list(map(id, weights))
        if identities != self._weights:
            self._weights, self._triggers = identities, self._find(weights)
        return self._triggers

    def note_node(self) -> None:
        """Called in the forward: learn the name under which profiles show the backward and the step."""
        if is_profiling():
            self.node = running_node()

    def _find(self, weights: list[torch.Tensor]) -> Triggers:
        """One trigger for all tables, except that a table which another lookup reads as well keeps its trigger."""
        own: Trigger | None = None
        tables: dict[Trigger, list[int]] = {}
        for table, weight in enumerate(weights):
            trigger: Trigger | None = _triggers.get(weight)
            if trigger is None or (trigger is not own and not any(user is not self for user in trigger.users)):
                trigger = own = own or Trigger(weight.device)
                _triggers[weight] = trigger
            trigger.users.add(self)
            tables.setdefault(trigger, []).append(table)
        return [(trigger, tuple(which)) for trigger, which in tables.items()]


def leaves(triggers: Triggers) -> list[torch.Tensor]:
    """The extra arguments of a lookup's autograd node."""
    return [trigger.leaf for trigger, _ in triggers]


def leaf_gradients(triggers: Triggers) -> list[torch.Tensor]:
    """What the node's backward returns for the leaves; tensors, since compiled autograd sums those of several calls."""
    return [torch.zeros_like(trigger.leaf) for trigger, _ in triggers]


@torch.compiler.disable
def leave_for_step(triggers: Triggers, kept: list[Any], part: GradientPart) -> None:
    """Called in the backward of the node: leave its part, to be stepped when all parts of the pass have arrived.

    Args:
        triggers: those of the node's forward.
        kept: a list that the forward put on the node's context, and that is freed with the graph.
        part: what this backward contributes.
    """
    left = _Left(part, len(triggers))
    kept[:] = [other for other in kept if other.part is not None]
    kept.append(left)
    for trigger, tables in triggers:
        trigger.leave(left, tables)


@torch.compiler.disable
def _step(parts: list[tuple[GradientPart, tuple[int, ...]]]) -> None:
    """Step all tables of ``parts``. Opaque to compiled autograd, because the kernels work on memory addresses."""
    lookups: dict[StepOnce, list[GradientPart]] = {}
    for part, _ in parts:
        lookups.setdefault(part.lookup, []).append(part)
    with later_range(parts[0][0].lookup.node, STEP):
        _step_lookups(parts, lookups)


def _step_lookups(
    parts: list[tuple[GradientPart, tuple[int, ...]]], lookups: Mapping[StepOnce, list[GradientPart]]
) -> None:
    read = [weight for (first, *_) in lookups.values() for weight in map(id, first.weights)]
    alike = all(_same(part.weights, others[0].weights) for others in lookups.values() for part in others)
    if alike and len(read) == len(set(read)) and all(len(tables) == len(part.weights) for part, tables in parts):
        for same in lookups.values():
            same[0].step_with(same)
    elif not parts[0][0].step_shared(parts):
        step_by_weight(parts)


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return list(map(id, one)) == list(map(id, other))


def step_by_weight(parts: Sequence[tuple[GradientPart, tuple[int, ...]]]) -> None:
    """Step each weight once, however many lookups and tables its gradient comes from.

    Args:
        parts: each with its tables that are to be stepped.
    """
    weights: dict[int, tuple[torch.Tensor, FusedOptimizer]] = {}
    gradients: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for part, tables in parts:
        for table in tables:
            weight = part.weights[table]
            if weight.requires_grad and not weight.is_meta:
                weights.setdefault(id(weight), (weight, part.optimizers[table]))
                gradients.setdefault(id(weight), []).append(part.of_table(table))
    for key, (weight, optimizer) in weights.items():
        optimizer.prepare(weight)
        rows = torch.cat([rows for rows, _ in gradients[key]])
        by_row = torch.cat([by_row for _, by_row in gradients[key]])
        optimizer.step(weight.data, rows, by_row)
