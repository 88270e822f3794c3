"""Raw ids on their way from ``hash_ids`` into a lookup that finds their rows itself: both nodes run as one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.kernels import hash_index
from recfx.kernels.pooled_lookup import IndexView

if TYPE_CHECKING:
    from recfx.nodes.hash_ids import HashIds


class RawIds:
    """What ``hash_ids`` gives where its lookup is lowered together with it.

    To anybody else it is the KJT of rows: reading anything of it hashes the ids.

    Args:
        features: the bags of raw ids, on the CPU.
        hash_ids: the node, in the mode in which it was called.
    """

    def __init__(self, features: KeyedJaggedTensor, hash_ids: HashIds) -> None:
        self.features = features
        self.training = hash_ids.training
        self._hash_ids = hash_ids
        self._hashed: KeyedJaggedTensor | None = None

    def hashed(self) -> KeyedJaggedTensor:
        """The KJT of rows."""
        if self._hashed is None:
            self._hashed = self._hash_ids.hash(self.features)
        return self._hashed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask before there is anything
            raise AttributeError(name)
        return getattr(self.hashed(), name)

    # What a kernel that finds rows asks for: see recfx.lowering.registry.IdsToRows

    def find_views(self) -> list[IndexView | None]:
        """The index of each table, None for tables without."""
        return self._hash_ids.find_views()

    def insert(self, ids: torch.Tensor, rows: torch.Tensor, absent_per_table: list[int]) -> None:
        """Give rows to the ids that have none, and fill them in."""
        hash_ids = self._hash_ids
        segments = hash_ids.segments(self.features)
        absent = torch.nonzero(rows < 0).squeeze(1)
        edges = [edge for segment in segments for edge in (segment.begin, segment.end)]
        borders = torch.searchsorted(absent, torch.tensor(edges, device="cpu")).tolist()
        found = [
            segment._replace(begin=begin, end=end)
            for segment, begin, end in zip(segments, borders[::2], borders[1::2], strict=True)
        ]
        rows[absent] = hash_ids.find_or_insert(ids[absent], found)
        resident = [
            (segment.end - segment.begin) - (new.end - new.begin) for segment, new in zip(segments, found, strict=True)
        ]
        hash_ids.count_found(segments, resident, batches=0)

    def answered(self, absent_per_table: list[int]) -> None:
        """Count what needed no insertion."""
        hash_ids = self._hash_ids
        segments = hash_ids.segments(self.features)
        if self.training:
            hash_ids.count_found(segments, [segment.end - segment.begin for segment in segments], batches=1)
            return
        absent = dict(zip([table.name for table in hash_ids.tables], absent_per_table, strict=True))
        hash_ids.count_answers(segments, [absent[segment.table.name] for segment in segments])


def add_found(counts: list[torch.Tensor], found: list[int], batches: int) -> None:
    """Count ids of a training batch that had their rows already.

    Args:
        counts: of each table, see ``recfx.kernels.index_buffers``.
        found: ids of each table.
        batches: 1, or 0 where the batch was counted by ``find_or_insert``.
    """
    rest = [0] * (counts[0].numel() - 2) if counts else []
    hash_index.add_counts(counts, [amount for count in found for amount in (batches, count, *rest)])
