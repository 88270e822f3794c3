"""Slices of a table's index: where a table may be cut, and how the state of a whole table is cut and joined again.

What an index does in a bucket does not depend on which slice holds the bucket. So if slices have seen the same batches,
each its own ids, then their states are slices of the state of a whole index.

A table is cut between its *parts*: every bucket is one, and the dense rows are divided into at most 1,024. An index
counts for its slice as a whole. In the state of a sharded table, the first part of each slice has its statistics, and
whoever loads adds up those of its parts: every slice gets back what it had counted, and wherever the table is cut, the
sums stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recfx.hashing.config import ResolvedHashConfig
from recfx.hashing.identity import IDENTITY, torn
from recfx.kernels.index.buckets import bucket_begin, bucket_from
from recfx.kernels.index.index_buffers import BATCHES, COUNTERS, IndexPolicy

COUNTS, SLICE_COUNTS = "counts", "slice_counts"
STATISTICS = COUNTERS[BATCHES + 1 :]  # every slice has the table's number of batches
_MOST_DENSE_PARTS = 1024


def dense_parts(config: ResolvedHashConfig | IndexPolicy) -> int:
    """How many parts the dense rows have."""
    return min(config.dense_rows, _MOST_DENSE_PARTS)


def part_count(config: ResolvedHashConfig) -> int:
    """How many parts the table has."""
    return dense_parts(config) + config.buckets


def parts_between(config: ResolvedHashConfig | IndexPolicy, row_begin: int, row_end: int) -> range:
    """The parts that begin in these rows."""
    first, end = (_part_from(config, row) for row in (row_begin, row_end))
    return range(first, end)


def border_at(config: ResolvedHashConfig, row: int) -> int:
    """The last row, up to this one, at which a part begins; the number of rows if ``row`` is that."""
    if row < config.dense_rows:
        parts = dense_parts(config)
        return _last_up_to(row, config.dense_rows, parts) * config.dense_rows // parts
    if row == config.dense_rows:  # perhaps there are no others
        return row
    bucket = min(config.buckets, _last_up_to(row - config.dense_rows, config.index_rows, config.buckets))
    return bucket_begin(bucket, config.rows, config.dense_rows, config.buckets)


def share(counts: Tensor, row_begin: int) -> Tensor:
    """The ``counts`` of a slice, given the whole table's, whose statistics the first slice takes: a new tensor."""
    own = counts.clone()
    own[BATCHES + 1 :] *= row_begin == 0
    return own


def folded(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state by buffer name whose ``counts`` say everything: what slices have counted is added, and left out."""
    whole = dict(state)
    parts = whole.pop(SLICE_COUNTS, None)
    if parts is not None and COUNTS in whole:
        whole[COUNTS] = whole[COUNTS].clone()
        whole[COUNTS][BATCHES + 1 :] += parts.sum(dim=0)
    return whole


class SliceCounts:
    """The counts of the slice ``[row_begin, row_end)`` as the state of a sharded table has them, so that a checkpoint
    can be loaded into them.
    """

    def __init__(self, config: ResolvedHashConfig, row_begin: int, row_end: int) -> None:
        self._row_begin = row_begin
        # Zeros, until the statistics of a whole table are loaded into it.
        self.of_table = torch.zeros(len(STATISTICS), dtype=torch.int64, device="cpu")
        self.of_parts = self.of_table.new_zeros(len(parts_between(config, row_begin, row_end)), len(STATISTICS))
        self._batches: Tensor | None = None
        self._versions = self._current()

    def take(self, counts: Tensor, first: SliceCounts | None) -> None:
        """Hold what the slice has counted. ``first`` is the first slice of the table on this rank, if that is another
        one: the number of batches and ``of_table`` are only loaded there.
        """
        self.of_parts.zero_()[:1] = counts[BATCHES + 1 :]
        if first is None:
            self.of_table.zero_()
            self._batches = counts[: BATCHES + 1]
        else:
            self.of_table, self._batches = first.of_table, first._batches
        self.note()

    def note(self) -> None:
        """Note that what is here now was not loaded."""
        self._versions = self._current()

    def loaded(self) -> dict[str, Tensor]:
        """The state of the slice, by buffer name, that was loaded since ``take``; empty if none was."""
        if self._batches is None or self._versions == self._current():
            return {}
        return {COUNTS: share(torch.cat([self._batches, self.of_table]), self._row_begin), SLICE_COUNTS: self.of_parts}

    def _current(self) -> tuple[int, int]:
        return self.of_table._version, self.of_parts._version


def _part_from(config: ResolvedHashConfig | IndexPolicy, row: int) -> int:
    """The first part that begins at or after this row."""
    parts = dense_parts(config)
    if row < config.dense_rows:
        return -(-row * parts // config.dense_rows)
    return parts + bucket_from(row, config.rows, config.dense_rows, config.buckets)


def _last_up_to(row: int, rows: int, pieces: int) -> int:
    """The last piece that begins at or before this row; number ``k`` begins at ``k * rows // pieces``."""
    return ((row + 1) * pieces - 1) // rows


def row_cuts(config: ResolvedHashConfig, pieces: int) -> list[int]:
    """The borders that cut a table into slices of similar size: ``pieces + 1`` of them, from 0 to ``rows``.

    The borders ascend; slices may be empty. Border ``k`` is the row at which the part of row ``k * rows // pieces``
    begins: its bucket, or, of up to 1,024 dense rows, the row itself.
    """
    return [border_at(config, piece * config.rows // pieces) for piece in range(pieces + 1)]


def slice_state(
    config: ResolvedHashConfig, state: Mapping[str, Tensor], row_begin: int, row_end: int
) -> dict[str, Tensor]:
    """Cut the state of the slice ``[row_begin, row_end)`` out of the state of a whole table, by buffer name: views of
    the rows, and a copy of the slice's ``share`` of ``counts``.
    """
    parts = state.get(SLICE_COUNTS)
    if parts is not None and parts.size(0) != part_count(config):  # of a table with other buckets
        state = folded(state)
    own = parts_between(config, row_begin, row_end)
    piece = {}
    for name, value in state.items():
        if name == COUNTS:
            piece[name] = share(value, row_begin)
        elif name == SLICE_COUNTS:
            piece[name] = value[own.start : own.stop]
        else:
            piece[name] = value if name == IDENTITY else value[row_begin:row_end]
    return piece


def join_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the states of a table's slices, given in the order of their rows, to the state of the whole table.

    Its ``counts`` have the highest number of batches and the sums of the statistics; its ``slice_counts`` are zeros.
    ``torn_state`` if the states have different names, or are of different tables.
    """
    names = states[0].keys()
    if any(state.keys() != names for state in states):
        raise torn(f"The slices of a table have saved different things: {[sorted(state) for state in states]}.", "")
    whole = {}
    for name in names:
        values = [state[name] for state in states]
        if name == COUNTS:
            counts = torch.stack(values)
            whole[name] = counts.sum(dim=0)
            whole[name][BATCHES] = counts[:, BATCHES].max()
        elif name == IDENTITY:
            if any(not torch.equal(value, values[0]) for value in values):
                raise torn("The slices belong to different tables.", "")
            whole[name] = values[0].clone()
        else:
            whole[name] = torch.cat(values)
    if SLICE_COUNTS not in whole:
        return whole
    return {**folded(whole), SLICE_COUNTS: torch.zeros_like(whole[SLICE_COUNTS])}
