"""The tables of a sharded model, as rank 0 reads them from all ranks: piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from recfx.collections.sharding.collection import ShardedCollection
from recfx.exporter.buffers import PIECE_BYTES, TableSource
from recfx.exporter.ranks import Ranks
from recfx.hashing import HashIndex
from recfx.ir.facts import FrozenIndex
from recfx.ir.shards import ShardedTable
from recfx.ir.tables import TableSpec

_HeldIds = tuple[int, int]
"""How many ids a slice of an index holds, and the table's row of id -1 if it is there; otherwise -1."""


def gathered_tables(ranks: Ranks) -> dict[str, dict[str, TableSource]]:
    """Every sharded table, by collection and name. Collective; only rank 0 may read the pieces.

    Raises:
        CheckpointError: the state that was loaded in place into some rank's index is not valid; raised on all ranks.
    """
    found: dict[str, dict[str, TableSource]] = {}
    held = ranks.agree(lambda: [_held(module, table) for _, module, table in ranks.tables])
    for number, (path, module, table) in enumerate(ranks.tables):
        slices = [each for of_rank in held for each in of_rank[number]]
        spec = replace(table.table, dtype=module.dtypes[table.table.name])
        ids, side_row = sum(ids for ids, _ in slices), max((row for _, row in slices), default=-1)
        found.setdefault(path, {})[spec.name] = GatheredTable(spec, ids, side_row, number, ranks)
    return found


def _held(module: ShardedCollection, table: ShardedTable) -> list[_HeldIds]:
    """What this rank's slices of a table's index hold."""
    if not table.table.has_index:
        return []
    held = []
    for shard in table.slices(table.saved):
        if shard.rank == module.sharding.rank:
            index = module.store.index(shard.name)
            index.refresh()
            row = int(index.find(torch.tensor([-1], device="cpu")))
            held.append((len(index), row + shard.rows[0] if row >= 0 else -1))
    return held


@dataclass(frozen=True)
class GatheredTable:
    """One sharded table.

    Args:
        spec: the whole table.
        ids: how many ids its index holds.
        side_row: the row of id -1; -1 if it has none.
        number: its number among the tables of the ranks.
        ranks: the ranks.
    """

    spec: TableSpec
    ids: int
    side_row: int
    number: int
    ranks: Ranks

    @property
    def index(self) -> FrozenIndex | None:
        """None if ids are rows."""
        if not self.spec.has_index:
            return None
        return FrozenIndex(empty_index(self.spec, "meta").slot_count, self.side_row)

    def row_pieces(self) -> Iterator[torch.Tensor]:
        """Joined from the parts of all ranks that have some."""
        rows = self.spec.num_embeddings
        step = max(1, PIECE_BYTES // max(1, self.spec.embedding_dim * self.spec.dtype.itemsize))
        for begin in range(0, rows, step):
            yield self.ranks.rows(self.number, begin, min(begin + step, rows))

    def slot_pieces(self) -> Iterator[torch.Tensor]:
        """Made from the ids of all ranks, which takes this table's index."""
        if self.spec.has_index:
            yield from self._joined().slot_table()[0].split(PIECE_BYTES // 16)

    def _joined(self) -> HashIndex:
        index, rows, step = empty_index(self.spec, "cpu"), self.spec.num_embeddings, PIECE_BYTES // 16
        for begin in range(0, rows, step):
            self.ranks.ids(self.number, index.row_ids, index.row_state, begin, min(begin + step, rows))
        index.refresh()  # makes the slots
        return index


def empty_index(spec: TableSpec, device: str) -> HashIndex:
    """An empty index with as many slots as the table's, which must have one, and without what only training needs."""
    assert spec.hashing is not None
    plain = replace(spec.hashing, on_full="error", admit_after=1)
    return HashIndex(spec.num_embeddings, config=plain, name=spec.name, device=device)
