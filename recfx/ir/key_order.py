"""The keys of a collection, in order, with the position of each; a collection's nodes share one object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property


class KeyOrder(tuple[str, ...]):
    """A tuple of keys that finds the position of a key without a search.

    Before lookups are batched, each table has its own node. A search per node would make the conversion quadratic.
    """

    @classmethod
    def of(cls, keys: Iterable[str]) -> KeyOrder:
        """A ``KeyOrder`` of ``keys``, or ``keys`` itself if it already is one, to share the computed positions."""
        return keys if isinstance(keys, KeyOrder) else cls(keys)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The position of each key; if a key appears twice, its first position."""
        return {key: position for position, key in reversed(list(enumerate(self)))}
