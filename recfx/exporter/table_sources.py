"""Where the tables of a file come from: their rows and indexes, in pieces, so that no copy of one is ever made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from recfx.collections.collection import UnshardedCollection
from recfx.hashing import HashIndex
from recfx.ir.facts import FrozenIndex
from recfx.ir.tables import TableSpec
from recfx.kernels.index.slot_table import home_slots, slot_count

PIECE_BYTES = 2**22
"""The size of a piece, in bytes of the source; quantizing it takes several times as much."""


@dataclass(eq=False)
class TableSource:
    """One whole table: its rows, its index, how many ids that holds, and the row of id -1 (-1 if it has none)."""

    spec: TableSpec
    weight: torch.Tensor
    hash_index: HashIndex | None
    ids: int
    side_row: int

    @property
    def index(self) -> FrozenIndex | None:
        """None if ids are rows."""
        if self.spec.hashing is None or not self.spec.has_index:
            return None
        return FrozenIndex(slot_count(self.spec.hashing.index_rows), self.side_row)

    def row_pieces(self) -> Iterator[torch.Tensor]:
        """The rows on the CPU, in order: ``[rows of the piece, dim]`` each."""
        for begin, end in self.stretches(self.spec.embedding_dim * self.spec.dtype.itemsize):
            yield self.weight.detach()[begin:end]

    def stretches(self, row_bytes: int) -> Iterator[tuple[int, int]]:
        """Where each piece of the rows begins and ends, if each row takes so many bytes."""
        count, step = self.spec.num_embeddings, max(1, PIECE_BYTES // max(1, row_bytes))
        yield from ((begin, min(begin + step, count)) for begin in range(0, count, step))

    def slot_pieces(self) -> Iterator[torch.Tensor]:
        """The slots, in order: int64 ``[slots of the piece, 2]`` each; they are made for this."""
        if self.hash_index is not None:
            yield from self.hash_index.slot_table()[0].split(PIECE_BYTES // 16)

    def longest_probe(self) -> int:
        """The most slots that finding an id of the table reads."""
        slots, begin, longest = 0 if self.index is None else self.index.slots, 0, 0
        for piece in self.slot_pieces():
            places = torch.nonzero(piece[:, 0] != -1).squeeze(1)
            if places.numel():
                distance = (begin + places - home_slots(piece[places, 0], slots)) & (slots - 1)
                longest = max(longest, int(distance.max()) + 1)
            begin += piece.size(0)
        return longest


def local_tables(collection: UnshardedCollection) -> dict[str, TableSource]:
    """The tables of a collection, by name."""
    tables: dict[str, TableSource] = {}
    for spec in collection.tables:
        index = collection.index(spec.name) if spec.name in collection.hash_indexes else None
        ids, side_row = (0, -1) if index is None else (len(index), int(index.index_buffers().side_row[0]))
        tables[spec.name] = TableSource(spec, collection.weight(spec.name), index, ids, side_row)
    return tables
