"""The operators of this host: those of the C++ library, or their references where it cannot be had.

What is not part of a graph (an index by itself, its state) uses these; nodes of a graph ask the registry of targets.
"""

from __future__ import annotations

from typing import Protocol

from . import index_rebuild as index_rebuild_operators
from . import index_rebuild_reference, library
from .index_buffers import IndexBuffers, IndexPolicy
from .index_rebuild import Rebuilt


class IndexRebuildOperators(Protocol):
    """``index_rebuild.py``, or whatever keeps its contract."""

    def rebuild(self, buffers: IndexBuffers, policy: IndexPolicy) -> Rebuilt:
        """See ``index_rebuild.rebuild``."""


def index_rebuild() -> IndexRebuildOperators:
    """The operators that make an index again from its state."""
    return index_rebuild_operators if library.load() else index_rebuild_reference
