"""What one node does in one step: expressions in ``B``, ``W`` and ``L_<feature>``, or numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from recfx.ir.meta import Collective
from recfx.planner.pricing.cost_text import expression

BATCH_SIZE, LENGTH = 512, 1
"""The samples per rank and the ids per bag that TorchRec's planner assumes of a batch of which nothing is known."""


@dataclass(frozen=True)
class Work:
    """What a node does in the forward or in the backward of one step, on one rank.

    Args:
        read_bytes: bytes read from memory.
        written_bytes: bytes written to memory.
        flops: floating-point operations.
        random_accesses: how many of the reads go to places that no prefetcher can guess: rows of tables.
        index_accesses: the same for what indexes know of ids: their slots, the scores of rows.
        copied_bytes: bytes copied between the host and a device.
        sorted_ids: how many ids are sorted by row, before a fused step.
        tables: how many tables are gone through one after the other, with rows to read or to step.
        indexes: how many indexes are called.
        copied_ranges: how many ranges of columns are copied, each row by itself, to put columns into order.
    """

    read_bytes: Any = 0
    written_bytes: Any = 0
    flops: Any = 0
    random_accesses: Any = 0
    index_accesses: Any = 0
    copied_bytes: Any = 0
    sorted_ids: Any = 0
    tables: Any = 0
    indexes: Any = 0
    copied_ranges: Any = 0

    def __add__(self, other: Work) -> Work:
        return Work(*map(operator.add, vars(self).values(), vars(other).values()))

    @classmethod
    def total(cls, parts: Iterable[Work]) -> Work:
        return cls(*map(total, zip(*(vars(part).values() for part in parts), strict=True)))

    def mapped(self, change: Callable[[Any], Any]) -> Work:
        """This work with every amount changed, such as expressions to numbers."""
        return Work(*map(change, vars(self).values()))


NOTHING = Work()


@dataclass(frozen=True)
class Phases:
    """The work of a node in the forward, and in the backward with the step of fused optimizers."""

    forward: Work
    backward: Work = NOTHING

    @classmethod
    def same(cls, work: Work) -> Phases:
        """As much work in the backward as in the forward."""
        return cls(work, work)


@dataclass(frozen=True)
class Resident:
    """Bytes that stay in the memory of one rank between steps.

    Args:
        weights: of tables or of dense parameters.
        optimizer: of the state of fused optimizers, as it is after the first step.
        index: of the indexes from ids to rows.
    """

    weights: int = 0
    optimizer: int = 0
    index: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.index

    def __add__(self, other: Resident) -> Resident:
        return Resident(self.weights + other.weights, self.optimizer + other.optimizer, self.index + other.index)


NO_RESIDENT = Resident()


@dataclass(frozen=True, repr=False)
class NodeCost:
    """What one node of a graph costs per step, on one rank.

    Args:
        name: the node's name in the graph, in profiles and in reports.
        kind: its kind (see ``recfx.ir.node_kinds``), or ``"dense"`` for what recfx did not make.
        collection: fully qualified name of its collection; ``""`` for a root.
        tables: the names of the tables that it works on.
        device: the device type of its value, ``""`` if unknown.
        kernel: the backend that serves it, if it is a lookup.
        forward: its work in the forward.
        backward: its work in the backward; nothing in eval mode.
        collectives: its collective calls. Their bytes are what this rank passes to the call, its own part included.
        resident: the bytes that it keeps between steps. What several nodes share is counted at the first of them.
        calls: how often a step runs it, as far as that is known.
        on_host: whether it runs on the host of the device that has the tables.
    """

    name: str
    kind: str
    collection: str
    tables: tuple[str, ...]
    device: str
    kernel: str
    forward: Work
    backward: Work
    collectives: tuple[Collective, ...]
    resident: Resident
    calls: int = 1
    on_host: bool = False

    def __repr__(self) -> str:
        return f"NodeCost({self.name!r}, {self.kind}, reads {expression(self.read_bytes)} bytes)"

    @property
    def work(self) -> Work:
        """Forward and backward of one call."""
        return self.forward + self.backward

    @property
    def read_bytes(self) -> sympy.Expr:
        """Bytes read from memory per step."""
        return self.calls * self.work.read_bytes

    @property
    def written_bytes(self) -> sympy.Expr:
        """Bytes written to memory per step."""
        return self.calls * self.work.written_bytes

    @property
    def flops(self) -> sympy.Expr:
        """Floating-point operations per step."""
        return self.calls * self.work.flops

    @property
    def wire_bytes(self) -> sympy.Expr:
        """Bytes that this rank passes to collectives per step, its own part included."""
        return self.calls * sympy.Add(*(call.bytes for call in self.collectives))

    @property
    def resident_bytes(self) -> int:
        return self.resident.total


def plain_number(value: Any) -> int | float:
    """A number of sympy's as Python's: an ``int`` if it is whole."""
    number = float(value)
    return int(value) if number.is_integer() else number


_NUMBERS = frozenset({int, float})


def total(terms: Iterable[Any]) -> Any:
    """The sum of expressions or of numbers; a sum of many expressions, one by one, would take quadratic time."""
    listed = list(terms)
    if not _NUMBERS.issuperset(map(type, listed)) and any(isinstance(term, sympy.Basic) for term in listed):
        return sympy.Add(*listed)
    return sum(listed)
