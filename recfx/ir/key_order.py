"""The keys of a collection, in order, with the position of each: made once per collection and shared by its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property


class KeyOrder(tuple[str, ...]):
    """A tuple of keys that finds the position of a key without a search.

    Each table has a node of its own before lookups are batched. A search per node would make the conversion quadratic.
    """

    @classmethod
    def of(cls, keys: Iterable[str]) -> KeyOrder:
        """``keys`` themselves where they are a ``KeyOrder`` already: what it has computed is shared then."""
        return keys if isinstance(keys, KeyOrder) else cls(keys)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Position of each key; of the first one where a key is there twice."""
        return {key: position for position, key in reversed(list(enumerate(self)))}
