"""Slices of a table's index: where a table is cut, and the state of one slice made of the whole table's, and back.

An index does the same for a bucket wherever it is, so the state of slices that have seen the same batches, each its own
ids of them, is the state of a whole index, cut; and what follows is the same after cutting it elsewhere. Only the
statistics in ``counts`` cannot be told apart: they go to the first slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recfx.hashing.config import ResolvedHashConfig
from recfx.hashing.identity import IDENTITY
from recfx.hashing.state_errors import torn
from recfx.kernels.buckets import bucket_begin
from recfx.kernels.index_buffers import BATCHES

_COUNTS = "counts"


def row_cuts(config: ResolvedHashConfig, pieces: int) -> list[int]:
    """Where a table is cut into slices of about the same size: ``pieces + 1`` borders, the first 0, the last ``rows``.

    They ascend; slices may be empty. Cut ``k`` is at row ``k * rows // pieces`` if that is a dense one, else where the
    row's bucket begins.
    """
    if pieces < 1:
        raise ValueError(f"a table is cut into at least one piece, not {pieces}")
    return [_border_at(config, piece * config.rows // pieces) for piece in range(pieces + 1)]


def _border_at(config: ResolvedHashConfig, row: int) -> int:
    """The last row up to this one where the table may be cut."""
    if row <= config.dense_rows:
        return row
    # The last bucket b with b * index_rows // buckets <= index_row.
    index_row = row - config.dense_rows
    bucket = min(config.buckets, ((index_row + 1) * config.buckets - 1) // config.index_rows)
    return bucket_begin(bucket, config.rows, config.dense_rows, config.buckets)


def slice_state(state: Mapping[str, Tensor], row_begin: int, row_end: int) -> dict[str, Tensor]:
    """The state of the slice ``[row_begin, row_end)`` out of a whole table's.

    Args:
        state: by buffer name, as an index's ``state_dict`` has it.

    Returns:
        Views of the rows; ``counts`` is a copy: the number of batches is that of the table, the statistics are kept
        where ``row_begin`` is 0, and 0 elsewhere.
    """
    piece = {}
    for name, value in state.items():
        if name == _COUNTS:
            counts = value.clone()
            if row_begin > 0:
                counts[torch.arange(counts.numel()) != BATCHES] = 0
            piece[name] = counts
        else:
            piece[name] = value if name == IDENTITY else value[row_begin:row_end]
    return piece


def join_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The whole table's state out of those of its slices, in the order of their rows.

    ``counts``: the highest number of batches, the sums of the statistics.

    Raises:
        CheckpointError: ``torn_state``, if they do not have the same names, or differ in ``identity``.
    """
    if not states:
        raise ValueError("there is no state to join")
    names = states[0].keys()
    if any(state.keys() != names for state in states):
        raise torn(f"The slices of a table have saved different things: {[sorted(state) for state in states]}.", "")
    whole = {}
    for name in names:
        values = [state[name] for state in states]
        if name == _COUNTS:
            counts = torch.stack(values)
            whole[name] = counts.sum(dim=0)
            whole[name][BATCHES] = counts[:, BATCHES].max()
        elif name == IDENTITY:
            if any(not torch.equal(value, values[0]) for value in values):
                raise torn("The slices are of different tables.", "")
            whole[name] = values[0].clone()
        else:
            whole[name] = torch.cat(values)
    return whole
