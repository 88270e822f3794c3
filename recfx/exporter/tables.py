"""Where the tables of an exported file come from: their rows in pieces, so that no copy of a table is ever made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from recfx.hashing import HashIndex
from recfx.ir.facts import FrozenIndex
from recfx.ir.tables import TableSpec
from recfx.kernels.index.slot_table import home_slots

PIECE_BYTES = 2**22
"""The size of a piece, in bytes of the source; quantizing it takes several times as much."""


class TableSource(Protocol):
    """The rows of one table, and its index."""

    @property
    def spec(self) -> TableSpec:
        """The whole table."""
        ...

    @property
    def index(self) -> FrozenIndex | None:
        """None if ids are rows."""
        ...

    @property
    def ids(self) -> int:
        """How many ids its index holds."""
        ...

    def row_pieces(self) -> Iterator[torch.Tensor]:
        """The rows on the CPU, in order: ``[rows of the piece, dim]`` each."""
        ...

    def slot_pieces(self) -> Iterator[torch.Tensor]:
        """The slots, in order: int64 ``[slots of the piece, 2]`` each."""
        ...


def longest_probe(source: TableSource) -> int:
    """The most slots that finding an id of a table reads."""
    slots, begin, longest = 0 if source.index is None else source.index.slots, 0, 0
    for piece in source.slot_pieces():
        places = torch.nonzero(piece[:, 0] != -1).squeeze(1)
        if places.numel():
            distance = (begin + places - home_slots(piece[places, 0], slots)) & (slots - 1)
            longest = max(longest, int(distance.max()) + 1)
        begin += piece.size(0)
    return longest


@dataclass(frozen=True)
class LocalTable:
    """A table that this process holds as a whole."""

    spec: TableSpec
    weight: torch.Tensor
    hash_index: HashIndex | None

    @property
    def index(self) -> FrozenIndex | None:
        """None if ids are rows."""
        if self.hash_index is None:
            return None
        return FrozenIndex(self.hash_index.slot_count, int(self.hash_index.index_buffers().side_row[0]))

    @property
    def ids(self) -> int:
        """How many ids its index holds."""
        return 0 if self.hash_index is None else len(self.hash_index)

    def row_pieces(self) -> Iterator[torch.Tensor]:
        """Views of the table, or copies on the CPU."""
        weight = self.weight.detach()
        for piece in weight.split(max(1, PIECE_BYTES // max(1, weight[:1].nbytes))):
            yield piece.cpu()

    def slot_pieces(self) -> Iterator[torch.Tensor]:
        """Pieces of the slot table, which is made for this."""
        if self.hash_index is not None:
            yield from self.hash_index.slot_table()[0].split(PIECE_BYTES // 16)
