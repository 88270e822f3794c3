"""Slices of a table's index: where a table may be cut, and how to slice the state of a whole table and join it again.

What an index does in a bucket does not depend on which slice holds the bucket. So if slices have seen the same batches,
each its own ids, then their states are slices of the state of a whole index, and cutting that state at different
borders does not change what happens next. Only the statistics in ``counts`` cannot be attributed to slices: they go to
the first one.
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
    """The borders that cut a table into slices of similar size: ``pieces + 1`` of them, from 0 to ``rows``.

    The borders ascend; slices may be empty. Border ``k`` is row ``k * rows // pieces`` if that is a dense row,
    otherwise the row at which its bucket begins.
    """
    if pieces < 1:
        raise ValueError(f"a table is cut into at least one piece, not {pieces}")
    return [_border_at(config, piece * config.rows // pieces) for piece in range(pieces + 1)]


def _border_at(config: ResolvedHashConfig, row: int) -> int:
    """The last row, up to this one, at which the table may be cut."""
    if row <= config.dense_rows:
        return row
    # The last bucket b with b * index_rows // buckets <= index_row.
    index_row = row - config.dense_rows
    bucket = min(config.buckets, ((index_row + 1) * config.buckets - 1) // config.index_rows)
    return bucket_begin(bucket, config.rows, config.dense_rows, config.buckets)


def slice_state(state: Mapping[str, Tensor], row_begin: int, row_end: int) -> dict[str, Tensor]:
    """Cut the state of the slice ``[row_begin, row_end)`` out of the state of a whole table.

    Args:
        state: tensors by buffer name, as in the ``state_dict`` of an index.

    Returns:
        Views of the rows, and a copy of ``counts``. It has the table's number of batches; its statistics are the
        table's if ``row_begin`` is 0, and otherwise 0.
    """
    piece = {}
    for name, value in state.items():
        if name == _COUNTS:
            counts = value.clone()
            if row_begin > 0:
                counts[torch.arange(counts.numel(), device=counts.device) != BATCHES] = 0
            piece[name] = counts
        else:
            piece[name] = value if name == IDENTITY else value[row_begin:row_end]
    return piece


def join_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the states of a table's slices, given in the order of their rows, to the state of the whole table.

    Its ``counts`` have the highest number of batches and the sums of the statistics.

    Raises:
        CheckpointError: ``torn_state`` if the states have different names or different values of ``identity``.
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
                raise torn("The slices belong to different tables.", "")
            whole[name] = values[0].clone()
        else:
            whole[name] = torch.cat(values)
    return whole
