"""What one node does in one step: expressions in ``B``, ``W`` and ``L_<feature>``, or numbers; and these as text."""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import sympy

from recfx.ir.meta import Collective

BATCH_SIZE, LENGTH = 512, 1
"""The samples per rank and the ids per bag that TorchRec's planner assumes of a batch of which nothing is known."""


@dataclass(frozen=True)
class Work:
    """What a node does in the forward or in the backward of one step, on one rank."""

    read_bytes: Any = 0  # bytes read from memory
    written_bytes: Any = 0  # bytes written to memory
    flops: Any = 0  # floating-point operations
    random_accesses: Any = 0  # how many of the reads go to places that no prefetcher can guess: rows of tables, slots
    copied_bytes: Any = 0  # bytes copied between the host and a device
    sorted_ids: Any = 0  # how many ids are sorted by row, before a fused step
    tables: Any = 0  # how many tables are gone through one after the other, with rows to read or to step
    indexes: Any = 0  # how many indexes are called
    copied_ranges: Any = 0  # how many ranges of columns are copied, each row by itself, to put columns into order

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
    """Bytes that stay in the memory of one rank between steps."""

    weights: int = 0  # of tables or of dense parameters
    optimizer: int = 0  # of the state of fused optimizers, as it is after the first step
    index: int = 0  # of the indexes from ids to rows

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.index

    def __add__(self, other: Resident) -> Resident:
        return Resident(self.weights + other.weights, self.optimizer + other.optimizer, self.index + other.index)


NO_RESIDENT = Resident()


@dataclass(frozen=True)
class Totals:
    """What nodes do per step, forward and backward, as expressions or as numbers."""

    read_bytes: Any = 0  # read from memory
    written_bytes: Any = 0  # written to memory
    flops: Any = 0  # floating-point operations
    wire_bytes: Any = 0  # what this rank passes to collectives, its own part included
    seconds: float = 0.0  # the predicted time, if the amounts are numbers
    resident: Resident = NO_RESIDENT  # bytes that stay in the memory of this rank between steps

    @property
    def resident_bytes(self) -> int:
        return self.resident.total

    @classmethod
    def of(cls, parts: Iterable[NodeCost | Totals]) -> Totals:
        """The sums over nodes, or over other sums."""
        listed = list(parts)
        sums = {field.name: total(getattr(part, field.name) for part in listed) for field in fields(cls)[:-1]}
        return cls(**sums, resident=sum((part.resident for part in listed), NO_RESIDENT))


@dataclass(frozen=True, repr=False)
class NodeCost:
    """What one node of a graph costs per step, on one rank: as expressions, or in the numbers of one batch."""

    name: str  # the node's name in the graph, in profiles and in reports
    kind: str  # its kind (see ``recfx.ir.node_kinds``), or ``"dense"`` for what recfx did not make
    collection: str  # fully qualified name of its collection; ``""`` for a root
    tables: tuple[str, ...]  # the names of the tables that it works on
    device: str  # the device type of its value, ``""`` if unknown
    kernel: str  # the backend that serves it, if it is a lookup
    forward: Work  # its work in the forward
    backward: Work  # its work in the backward; nothing in eval mode
    # its collective calls. Their bytes are what this rank passes to the call, its own part included
    collectives: tuple[Collective, ...]
    # the bytes that it keeps between steps. What several nodes share is counted at the first of them
    resident: Resident
    calls: int = 1  # how often a step runs it, as far as that is known
    on_host: bool = False  # whether it runs on the host of the device that has the tables
    seconds: float = 0.0  # the predicted time per step, if the amounts are numbers

    def __repr__(self) -> str:
        return f"NodeCost({self.name!r}, {self.kind})"

    def mapped(self, change: Callable[[Any], Any]) -> NodeCost:
        """This node with every amount changed, such as expressions to numbers."""
        calls = tuple(replace(call, bytes=change(call.bytes)) for call in self.collectives)
        return replace(
            self, forward=self.forward.mapped(change), backward=self.backward.mapped(change), collectives=calls
        )

    @property
    def read_bytes(self) -> Any:
        """Bytes read from memory per step."""
        return self.calls * (self.forward.read_bytes + self.backward.read_bytes)

    @property
    def written_bytes(self) -> Any:
        """Bytes written to memory per step."""
        return self.calls * (self.forward.written_bytes + self.backward.written_bytes)

    @property
    def flops(self) -> Any:
        """Floating-point operations per step."""
        return self.calls * (self.forward.flops + self.backward.flops)

    @property
    def wire_bytes(self) -> Any:
        """Bytes that this rank passes to collectives per step, its own part included."""
        return self.calls * total(call.bytes for call in self.collectives)

    @property
    def resident_bytes(self) -> int:
        return self.resident.total


_NUMBERS = frozenset({int, float})


def total(terms: Iterable[Any]) -> Any:
    """The sum of expressions or of numbers; a sum of many expressions, one by one, would take quadratic time."""
    listed = list(terms)
    if not _NUMBERS.issuperset(map(type, listed)) and any(isinstance(term, sympy.Basic) for term in listed):
        return sympy.Add(*listed)
    return sum(listed)


_MOST_TERMS, _MOST_LENGTHS = 4, 8


def counted(names: Iterable[str]) -> str:
    """``3 row_wise, 1 table_wise``, the most frequent first."""
    return ", ".join(f"{count:,} {name}" for name, count in Counter(names).most_common())


def in_time(seconds: float) -> str:
    """A time in the unit that fits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def step_text(trains: bool, hardware: str, batch: int, lengths: Mapping[str, float], world_size: int) -> str:
    """The step that a time is predicted for, which is shown beside it; lengths as ``2.5`` or ``user=1, watched=50``."""
    kind, per_rank = "training step" if trains else "step in eval mode", " per rank" if world_size > 1 else ""
    shown = [
        f"{name}={round(length, 3):g}" for name, length in sorted(lengths.items(), key=lambda named: named[1] == 1)
    ]
    if len(set(lengths.values())) == 1:
        shown = [f"{round(next(iter(lengths.values())), 3):g}"]
    more = [f"and {len(shown) - _MOST_LENGTHS} more"] if len(shown) > _MOST_LENGTHS else []
    return f"{kind} on {hardware}, B={batch}{per_rank}, L: {', '.join([*shown[:_MOST_LENGTHS], *more])}"


@functools.lru_cache(maxsize=4096)  # the nodes of a collection have few different sizes
def expression(value: sympy.Expr) -> str:
    """A symbolic size; a sum over the lengths of many features is shortened: ``8*B*(L_f0 + 25 more)``."""
    lengths = sorted((symbol for symbol in value.free_symbols if symbol.name.startswith("L_")), key=str)
    if len(lengths) <= _MOST_TERMS:
        return str(value)
    first = lengths[0]
    shown = str(value.xreplace(dict.fromkeys(lengths[1:], sympy.Integer(0))))
    return re.sub(rf"(?<!\w){re.escape(first.name)}(?!\w)", lambda _: f"({first} + {len(lengths) - 1:,} more)", shown)
