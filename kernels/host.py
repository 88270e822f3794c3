"""The operators of this host: those of the C++ library, or their references where it cannot be had.

What is not part of a graph (an index by itself, its state) uses these; nodes of a graph ask the registry of targets.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from . import hash_index as hash_index_operators
from . import hash_index_reference, index_rebuild_reference, library
from . import index_rebuild as index_rebuild_operators
from .hash_index import InFlight, Inserted
from .index_buffers import IndexBuffers, IndexPolicy
from .index_rebuild import Rebuilt


class HashIndexOperators(Protocol):
    """``hash_index.py``, or whatever keeps its contracts; each function is told about there."""

    FINDS_ON_ANY_THREAD: bool

    def find(
        self,
        ids: Tensor,
        slots: Tensor,
        side_row: Tensor,
        dense_rows: int,
        lock: Tensor | None = None,
        dense_begin: int = 0,
    ) -> Tensor:
        """The row of each id, -1 where it has none."""

    def find_tables(
        self,
        ids: Tensor,
        begins: list[int],
        ends: list[int],
        slots: list[Tensor],
        side_rows: list[Tensor],
        locks: list[Tensor],
        dense_rows: list[int],
        dense_begins: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``find`` for several tables at once."""

    def find_or_insert(
        self,
        ids: Tensor,
        begins: list[int],
        ends: list[int],
        buffers: list[IndexBuffers],
        policies: list[IndexPolicy],
        in_flight: list[InFlight],
    ) -> Inserted:
        """One batch of training for several tables."""

    def add_counts(self, counts: list[Tensor], amounts: list[int]) -> None:
        """Add to the counts of several tables at once."""

    def mark_initialized(
        self,
        buffers: list[IndexBuffers],
        policies: list[IndexPolicy],
        rows: Tensor,
        begins: list[int],
        ends: list[int],
    ) -> None:
        """Rows that were marked as new have the weights of their ids now."""

    def erase(self, ids: Tensor, buffers: IndexBuffers, policy: IndexPolicy) -> Tensor:
        """Take the rows of these ids back."""


def hash_index() -> HashIndexOperators:
    """The operators that find and insert ids."""
    return hash_index_operators if library.load() else hash_index_reference


class IndexRebuildOperators(Protocol):
    """``index_rebuild.py``, or whatever keeps its contract."""

    def rebuild(self, buffers: IndexBuffers, policy: IndexPolicy) -> Rebuilt:
        """See ``index_rebuild.rebuild``."""


def index_rebuild() -> IndexRebuildOperators:
    """The operators that make an index again from its state."""
    return index_rebuild_operators if library.load() else index_rebuild_reference
