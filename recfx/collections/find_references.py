"""References from modules to other modules that ``nn.Module`` does not see.

A model may hold a module a second time: in a list, a helper object, a closure, a default argument, a weak reference.
``References`` finds these paths; ``Rewiring`` redirects them. Objects that can be neither copied nor changed, such as
generators, are *fixed*.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from recfx.collections.code_reads import CodeReads, functions_of, owner_of_code, reads_of, takes_nothing
from recfx.collections.object_kinds import WEAK_CONTAINERS, WEAK_REFERENCES, Edge, edges_of, is_atom, why_fixed


class Fixed(NamedTuple):
    """Something that refers to targets (by ``id``) and can be neither copied nor changed.

    ``where`` is a Python expression. ``read_by_code``: code that can run names it; ``never_called``: calling no target.
    """

    where: str
    why: str
    targets: set[int]
    read_by_code: bool
    never_called: bool


class References:
    """The paths from ``roots`` to ``targets`` through objects other than registered children.

    Args:
        targets: the modules to look for, by ``id``.
        roots: name, module and plain attributes of every module to start from. No path leads through a root.
        code: also look at the globals and class attributes that code on a path reads. They are fixed.
    """

    def __init__(
        self, targets: Mapping[int, Any], roots: Iterable[tuple[str, nn.Module, Iterable[Edge]]], code: bool = False
    ) -> None:
        self._targets, self._code = targets, code
        self._alive: dict[int, Any] = {}  # an id is unique only as long as its object is alive
        self._parents: dict[int, list[int]] = {}
        self._first: dict[int, tuple[int, str]] = {}
        self._fixed: dict[int, str] = {}
        self._read: set[int] = set()
        self._functions: list[types.FunctionType] = []
        starts = list(roots)
        self._names = {id(module): name for name, module, _ in starts}
        for _, module, _ in starts:
            self._alive[id(module)] = module
        for _, module, edges in starts:
            self._follow([(module, (f".{name}", value)) for name, value in edges])
            if code:
                self._follow(self._reads(module))
        self._reaching = self._find_reaching()
        self._fix_what_is_held_weakly()

    def reaches(self, value: Any) -> bool:
        """Whether ``value`` refers to a target, directly or indirectly."""
        return id(value) in self._reaching

    def fixed(self) -> list[Fixed]:
        """The fixed objects that refer to targets."""
        return [
            Fixed(
                self._way(key),
                why,
                self._targets_of(key),
                isinstance(self._alive[key], CodeReads),
                self._never_called(self._alive[key]),
            )
            for key, why in self._fixed.items()
            if key in self._reaching
        ]

    def way_to(self, target: int) -> str:
        """The first path to a target that was found, as a Python expression; ``""`` if there is no path."""
        return self._way(target) if target in self._first else ""

    def _follow(self, waiting: list[tuple[Any, Edge]]) -> None:
        while waiting:
            parent, (label, value) = waiting.pop()
            if type(value) in (dict, list, set, tuple) and not value:
                continue
            reads = type(value) is CodeReads
            if is_atom(value) and not reads:
                continue
            key = id(value)
            self._first.setdefault(key, (id(parent), label))
            if not reads:  # the owner need not be copied because of what its code reads
                self._parents.setdefault(key, []).append(id(parent))
            if key in self._alive or key in self._targets:
                continue
            self._alive[key] = value
            fixed = value.why if reads else why_fixed(value)
            if fixed:
                self._fixed[key] = fixed
            waiting += [(value, edge) for edge in (value.edges if reads else edges_of(value))]
            if self._code:
                waiting += self._reads(value)

    def _reads(self, value: Any) -> list[tuple[Any, Edge]]:
        owner = owner_of_code(value)
        if owner is None or id(owner) in self._read:
            return []
        self._read.add(id(owner))
        self._functions += functions_of(owner)
        return [(value, ("", reads)) for reads in reads_of(owner)]

    def _never_called(self, value: Any) -> bool:
        return isinstance(value, CodeReads) and all(
            takes_nothing(value.name, read, self._functions, attribute=value.attribute) for _, read in value.edges
        )

    def _find_reaching(self) -> set[int]:
        reaching: set[int] = set()
        waiting = [key for key in self._targets if key in self._parents]
        while waiting:
            for parent in self._parents.get(waiting.pop(), ()):
                if parent not in reaching and parent not in self._names:
                    reaching.add(parent)
                    waiting.append(parent)
        return reaching

    def _fix_what_is_held_weakly(self) -> None:
        """Mark weakly referenced objects that nothing else holds as fixed: a copy of them would be gone at once."""
        for key in self._reaching:
            holders = [self._alive[parent] for parent in self._parents.get(key, ())]
            if holders and all(isinstance(holder, (*WEAK_REFERENCES, *WEAK_CONTAINERS)) for holder in holders):
                for holder in holders:
                    kind = type(self._alive[key]).__name__
                    self._fixed[id(holder)] = f"a weak reference to a {kind} that the model itself does not hold"

    def _targets_of(self, start: int) -> set[int]:
        return {target for target in self._targets if target in self._parents and self._leads(start, target)}

    def _leads(self, start: int, target: int) -> bool:
        seen, above = {target}, [target]
        while above:
            for parent in self._parents.get(above.pop(), ()):
                if parent == start:
                    return True
                if parent not in seen and parent in self._reaching:
                    seen.add(parent)
                    above.append(parent)
        return False

    def _way(self, key: int) -> str:
        labels = []
        while key in self._first and key not in self._names:
            key, label = self._first[key]
            labels.append(label)
        return self._names.get(key, "") + "".join(reversed(labels))
