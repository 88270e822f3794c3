"""Fused optimizers step once per backward pass, when a table's whole gradient is known, like optimizers in backward.

If a lookup is called several times per step, or several lookups read one weight, the gradient comes from several nodes
of the autograd graph. The backward of each node leaves its part here. Autograd itself tells when all of them have run:
the lookups take a leaf as an argument, and the engine runs the leaf's ``AccumulateGrad`` once per backward pass, after
all nodes of that pass that lead to it.

Something else may read the weight as well, such as an output layer with tied weights. Autograd accumulates that
gradient in the weight's own node, and it joins the step of the same backward pass, whichever comes first. So does a
gradient that was there before: ``weight.grad`` is None afterwards, so that no ordinary optimizer steps with it again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakTensorKeyDictionary

from recfx.lowering.step.profiler_ranges import STEP, later_range
from recfx.lowering.step.trained_batch import Gradients, TrainedBatch, gradients_by_table, joined, reached
from recfx.optim.attached import attached_optimizers, take_over_step
from recfx.optim.fused_optimizer import FusedOptimizer


class GradientPart:
    """What one backward of a lookup leaves for the step: its batch, and the gradients of its outputs."""

    def __init__(self, lookup: StepOnce, kernels: Any, batch: TrainedBatch, gradients: Gradients) -> None:
        self.lookup, self.batch, self.gradients, self._kernels = lookup, batch, gradients, kernels
        self.weights, self.optimizers, self.step_rows = batch.weights, kernels.optimizers, kernels.step_rows
        # Whether each table gets a gradient. The others are left alone.
        self.reached = reached(kernels.table_of_feature, gradients, len(kernels.tables))

    def of_table(self, table: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that the table's bags read, int64 ``[n]``, and their gradients, float32 ``[n, dim]``."""
        kernels = self._kernels
        return gradients_by_table(self.batch, self.gradients, kernels.tables, kernels.combine, {table})[table]

    def step_with(self, parts: Sequence[GradientPart]) -> None:
        """Step all tables with the sum of ``parts``: this one, and others of the same lookup and tables."""
        if not any(gradient is not None and gradient.is_meta for gradient in self.gradients):
            features, combine = len(self._kernels.table_of_feature), self._kernels.combine
            batches, gradients = [part.batch for part in parts], [part.gradients for part in parts]
            self._kernels.step(*joined(batches, gradients, features, combine))


class _Left:
    """One part until the step has used it. The autograd node holds it, so that it is freed with the graph."""

    def __init__(self, part: GradientPart, triggers: int) -> None:
        self.part: GradientPart | None = part
        self.triggers = triggers  # how many have not stepped their tables yet


_PartOfTables = tuple[GradientPart, tuple[int, ...]]
_MANY = 16
_number_of_pass = torch._C._current_graph_task_id
_runs_in_this_pass = torch._C._will_engine_execute_node


@dataclass
class _Pass:
    """What one backward pass has brought for the tables of a trigger."""

    waiting: list[tuple[weakref.ref[_Left], Triggered]] = field(default_factory=list)  # the lookups' parts
    # Weights with a gradient from other readers or from before, which ``weight.grad`` gets for the step, by ``id``.
    arrived: dict[int, tuple[torch.Tensor, FusedOptimizer, Any]] = field(default_factory=dict)
    # Those whose gradient from other readers comes after all lookups of the pass.
    awaited: set[int] = field(default_factory=set)

    def parts(self) -> list[_PartOfTables]:
        waiting = [(left.part, triggered.tables) for reference, triggered in self.waiting if (left := reference())]
        return [(part, tables) for part, tables in waiting if part is not None]

    def still_to_come(self) -> set[int]:
        """The weights that something else reads in this pass, whose gradient from there has not arrived."""
        return {
            id(left.part.weights[table])
            for reference, (_, tables, nodes) in self.waiting
            if any(map(_runs_in_this_pass, nodes)) and (left := reference()) is not None and left.part is not None
            for table, node in zip(tables, nodes, strict=True)
            if _runs_in_this_pass(node) and id(left.part.weights[table]) not in self.arrived
        }

    def end(self) -> None:
        """Free the parts: the graph may live longer."""
        for reference, _ in self.waiting:
            if left := reference():
                left.triggers -= 1
                if not left.triggers:
                    left.part = None


class Trigger:
    """Steps some tables when a backward pass has reached all lookups that read them.

    Its ``leaf``, an empty tensor that requires a gradient, is an argument of every autograd node that reads these.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            place = "cpu" if device.type == "meta" else device
            self.leaf = torch.zeros(0, dtype=torch.float32, device=place, requires_grad=True)
            self.nothing = self.leaf.detach()
            grad_fn: Any = self.leaf.view_as(self.leaf).grad_fn
        self._accumulate = grad_fn.next_functions[0][0]  # the tensor alone does not keep it alive
        this = weakref.ref(self)

        def all_have_run(*gradients: Any) -> None:
            trigger = this()
            if trigger is not None:
                trigger._step()

        self._accumulate.register_hook(all_have_run)
        self._passes: dict[int, _Pass] = {}  # by number
        self._reached: deque[int] = deque(maxlen=_MANY)  # numbers of passes
        self.users: weakref.WeakSet[StepOnce] = weakref.WeakSet()

    def leave(self, left: _Left, triggered: Triggered) -> None:
        """Called in a backward, to have its tables of this part stepped."""
        self._pass(_number_of_pass()).waiting.append((weakref.ref(left), triggered))

    def _pass(self, number: int) -> _Pass:
        of_pass = self._passes.get(number)
        if of_pass is None:
            of_pass = self._passes[number] = _Pass()
            if len(self._passes) > _MANY:  # passes that failed, or that only computed other gradients
                for other, earlier in list(self._passes.items()):
                    if other != number and all(reference() is None for reference, _ in earlier.waiting):
                        del self._passes[other]
        return of_pass

    def _step(self) -> None:
        number = _number_of_pass()
        self._reached.append(number)
        current = self._passes.pop(number, None)
        if current is None:
            return
        parts = current.parts()
        awaited = current.still_to_come()
        current.arrived.update(_with_gradients(parts, awaited))
        if awaited:
            current.awaited = awaited
            self._passes[number] = current
        joined = awaited | current.arrived.keys()
        if alone := _where(parts, lambda part, table: id(part.weights[table]) not in joined) if joined else parts:
            _step(alone)
        for weight, optimizer, gradient in current.arrived.values():
            weight.grad = gradient
            _step_joined(parts, weight, optimizer)
        if not awaited:
            current.end()

    def join(self, weight: torch.Tensor, optimizer: FusedOptimizer) -> bool:
        """Called when other readers' gradient of a weight is there: whether it joins a step of the lookups."""
        number = _number_of_pass()
        if number not in self._reached:
            if _runs_in_this_pass(self._accumulate):
                self._pass(number).arrived[id(weight)] = weight, optimizer, weight.grad
                weight.grad = None  # lest the next pass takes it, if this one fails
                return True
            return False
        current = self._passes.get(number)
        if current is None or id(weight) not in current.awaited:
            return False
        current.awaited.discard(id(weight))
        if not current.awaited:
            del self._passes[number]
        _step_joined(current.parts(), weight, optimizer)
        if not current.awaited:
            current.end()
        return True


_triggers = WeakTensorKeyDictionary()  # weight -> Trigger; lookups that share a weight share its trigger


class Triggered(NamedTuple):
    """Tables of a lookup, by their positions, that one trigger steps; and autograd's nodes of their weights."""

    trigger: Trigger
    tables: tuple[int, ...]
    nodes: tuple[Any, ...]


Triggers = list[Triggered]


class StepOnce:
    """The fused step of one lookup; ``node`` is the graph node that ran it last, if a profiler recorded it."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.node = ""
        self._optimizers = optimizers
        self._weights: list[int] = []
        self._triggers: Triggers = []

    def triggers(self, weights: list[torch.Tensor]) -> Triggers:
        """The triggers that step these tables; the lookup's autograd node takes the leaf of each as an argument."""
        identities = list(map(id, weights))
        if identities != self._weights:
            self._weights, self._triggers = identities, self._find(weights)
        return self._triggers

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
        nodes = list(map(_watch_other_readers, weights, self._optimizers))
        return [
            Triggered(trigger, tuple(which), tuple(nodes[table] for table in which))
            for trigger, which in tables.items()
        ]


def leaf_gradients(triggers: Triggers) -> list[torch.Tensor]:
    """What the node's backward returns for the leaves; tensors, since compiled autograd sums those of several calls."""
    return [triggered.trigger.nothing for triggered in triggers]


@torch.compiler.disable
def leave_for_step(triggers: Triggers, kept: list[Any], part: GradientPart) -> None:
    """Called in the backward of the node: leave its part, to be stepped when all parts of the pass have arrived.

    ``triggers`` are those of the node's forward, which also put the list ``kept`` on the node's context: it is freed
    with the graph.
    """
    left = _Left(part, len(triggers))
    kept[:] = [other for other in kept if other.part is not None]
    kept.append(left)
    for triggered in triggers:
        triggered.trigger.leave(left, triggered)


def _watch_other_readers(weight: torch.Tensor, optimizer: FusedOptimizer) -> Any:
    """Let the gradient from other readers of ``weight`` join the steps of its lookups.

    Returns:
        autograd's node of the weight, which must be kept: the hook hangs on it.
    """

    @torch.compiler.disable
    def accumulated() -> None:
        if weight.grad is not None:
            optimizer.refuse_other_readers()
        trigger: Trigger | None = _triggers.get(weight)
        if trigger is None or not trigger.join(weight, optimizer):
            _step_alone(weight, optimizer)

    return take_over_step(weight, accumulated)


def _step_alone(weight: torch.Tensor, optimizer: FusedOptimizer) -> None:
    """Step a weight that lookups do not read in this pass: by the optimizer in backward itself, if it is attached."""
    attached = attached_optimizers(weight)
    for other in attached:
        if optimizer.is_form_of(other):
            other.state[weight].update(optimizer.dense_state(weight))
        other.step()
    if not attached:  # a copy: the lookups have its only optimizer
        _step_joined([], weight, optimizer)
    weight.grad = None


def _with_gradients(
    parts: Sequence[_PartOfTables], awaited: Collection[int]
) -> dict[int, tuple[torch.Tensor, FusedOptimizer, Any]]:
    """The weights with a gradient to step with, their optimizers, and it, by ``id``; those ``awaited`` get more."""
    return {
        id(weight): (weight, part.optimizers[table], weight.grad)
        for part, tables in parts
        if [weight for weight in part.weights if weight.grad is not None]  # there hardly ever is one
        for table in tables
        if (weight := part.weights[table]).grad is not None
        and (weight.requires_grad and not weight.is_meta and part.reached[table] and id(weight) not in awaited)
    }


def _where(parts: Sequence[_PartOfTables], is_kept: Callable[[GradientPart, int], bool]) -> list[_PartOfTables]:
    """The tables of ``parts`` that are kept."""
    left = [(part, tuple(table for table in tables if is_kept(part, table))) for part, tables in parts]
    return [(part, tables) for part, tables in left if tables]


def _step_joined(parts: Sequence[_PartOfTables], weight: torch.Tensor, optimizer: FusedOptimizer) -> None:
    """Step ``weight`` with the sum of what the lookups and the other readers gave."""
    of_weight = _where(parts, lambda part, table: part.weights[table] is weight and part.reached[table])
    step_by_weight(of_weight, [(weight, optimizer)])
    increment_version(weight)  # the other readers' nodes may have saved it for another backward
    weight.grad = None


@torch.compiler.disable
def _step(parts: list[_PartOfTables]) -> None:
    """Step all tables of ``parts``. Opaque to compiled autograd, because the kernels work on memory addresses."""
    # Kernels write past autograd, and other backwards may have noted the versions.
    stepped = [part.weights[table] for part, tables in parts for table in tables if part.reached[table]]
    increment_version([weight for weight in stepped if weight.requires_grad])
    lookups: dict[StepOnce, list[GradientPart]] = {}
    for part, _ in parts:
        lookups.setdefault(part.lookup, []).append(part)
    read = [id(weight) for same in lookups.values() for weight in same[0].weights]
    alike = len(parts) == len(lookups) or all(
        len({tuple(map(id, part.weights)) for part in same}) == 1 for same in lookups.values()
    )
    with later_range(parts[0][0].lookup.node, STEP):
        if alike and len(read) == len(set(read)) and all(len(tables) == len(part.weights) for part, tables in parts):
            for same in lookups.values():
                same[0].step_with(same)
            return
        step_by_weight(_where(parts, lambda part, table: part.reached[table]))


def step_by_weight(
    parts: Sequence[_PartOfTables], read_elsewhere: Sequence[tuple[torch.Tensor, FusedOptimizer]] = ()
) -> None:
    """Step each weight once, however many lookups and tables its gradient comes from.

    In weights that are ``read_elsewhere``, ``grad`` is the gradient from other readers.
    """
    weights: dict[int, tuple[torch.Tensor, FusedOptimizer, GradientPart | None]] = {}
    gradients: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for part, tables in parts:
        for table in tables:
            weight = part.weights[table]
            if weight.requires_grad and not weight.is_meta:
                weights.setdefault(id(weight), (weight, part.optimizers[table], part))
                gradients.setdefault(id(weight), []).append(part.of_table(table))
    for weight, optimizer in read_elsewhere:
        if weight.grad is not None:
            weights.setdefault(id(weight), (weight, optimizer, None))
            gradients.setdefault(id(weight), []).append(_rows_of(weight.grad))
    for key, (weight, optimizer, reader) in weights.items():
        rows = torch.cat([rows for rows, _ in gradients[key]])
        by_row = torch.cat([by_row for _, by_row in gradients[key]])
        if reader is not None:
            reader.step_rows(weight, optimizer, rows, by_row)
        else:
            optimizer.prepare(weight)
            optimizer.step(weight.data, rows, by_row)


def _rows_of(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a table's gradient that are not zero, and their gradients in float32, like ``of_table``."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return gradient.indices()[0], gradient.values().float()
    rows = gradient.ne(0).any(dim=1).nonzero().squeeze(1)
    return rows, gradient[rows].float()
