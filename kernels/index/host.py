"""The operators of this host: those of the C++ library, or their references if the library is not available.

Code outside a graph (an index on its own, its state) uses these; the nodes of a graph ask the registry of targets.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from recfx.kernels.build import library
from recfx.kernels.index import hash_index as hash_index_operators
from recfx.kernels.index import hash_index_reference, index_rebuild_reference
from recfx.kernels.index import index_rebuild as index_rebuild_operators
from recfx.kernels.index.hash_index import InFlight, Inserted, UndoRecord
from recfx.kernels.index.index_buffers import IndexBuffers, IndexPolicy
from recfx.kernels.index.index_rebuild import Rebuilt


class HashIndexOperators(Protocol):
    """``hash_index.py``, which describes each function, or anything that fulfils its contracts."""

    FINDS_ON_ANY_THREAD: bool

    def find(
        self,
        ids: Tensor,
        slot_groups: Tensor,
        side_row: Tensor,
        dense_rows: int,
        lock: Tensor | None = None,
        dense_begin: int = 0,
    ) -> Tensor:
        """The row of each id, -1 if it has none."""

    def find_tables(
        self,
        ids: Tensor,
        begins: list[int],
        ends: list[int],
        slot_groups: list[Tensor],
        side_rows: list[Tensor],
        locks: list[Tensor],
        dense_rows: list[int],
        dense_begins: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``find`` for several tables at once."""

    def slot_tables_(
        self,
        all_slots: Tensor,
        all_side_rows: Tensor,
        slot_counts: list[int],
        row_ids: list[Tensor],
        row_states: list[Tensor],
        locks: list[Tensor],
    ) -> None:
        """Write several indexes as slot tables."""

    def find_or_insert(
        self,
        ids: Tensor,
        begins: list[int],
        ends: list[int],
        buffers: list[IndexBuffers],
        policies: list[IndexPolicy],
        in_flight: list[InFlight],
    ) -> Inserted:
        """Take several tables through one training batch."""

    def find_or_insert_undoably(
        self,
        ids: Tensor,
        begins: list[int],
        ends: list[int],
        buffers: list[IndexBuffers],
        policies: list[IndexPolicy],
        in_flight: list[InFlight],
    ) -> UndoRecord:
        """``find_or_insert``, with what it takes to undo it."""

    def undo_insert(
        self,
        record: UndoRecord,
        begins: list[int],
        ends: list[int],
        buffers: list[IndexBuffers],
        policies: list[IndexPolicy],
    ) -> None:
        """Take the last batch back."""

    def add_counts(self, counts: list[Tensor], amounts: list[int]) -> None:
        """Add to the counts of several tables at once."""

    def any_nonzero(self, cells: list[Tensor]) -> bool:
        """Whether any of several tables' numbers is not 0."""

    def mark_initialized(
        self,
        buffers: list[IndexBuffers],
        policies: list[IndexPolicy],
        rows: Tensor,
        begins: list[int],
        ends: list[int],
    ) -> None:
        """Record that rows which were marked as new now hold the weights of their ids."""

    def erase(self, ids: Tensor, buffers: IndexBuffers, policy: IndexPolicy) -> Tensor:
        """Free the rows of these ids."""


def hash_index() -> HashIndexOperators:
    """The operators that find and insert ids."""
    return hash_index_operators if library.load() else hash_index_reference


class IndexRebuildOperators(Protocol):
    """``index_rebuild.py``, or anything that fulfils its contract."""

    def rebuild(self, buffers: IndexBuffers, policy: IndexPolicy) -> Rebuilt:
        """See ``index_rebuild.rebuild``."""


def index_rebuild() -> IndexRebuildOperators:
    """The operators that rebuild an index from its state."""
    return index_rebuild_operators if library.load() else index_rebuild_reference
