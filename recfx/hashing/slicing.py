"""Slices of a table's index: where a table may be cut, and how to slice the state of a whole table and join it again.

What an index does in a bucket does not depend on which slice holds the bucket. So if slices have seen the same batches,
each its own ids, then their states are slices of the state of a whole index, and cutting that state at different
borders does not change what happens next. Only the statistics in ``counts`` cannot be attributed to the ids of a slice:
each slice gets its share of what was counted, see ``recfx/hashing/slice_counts.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recfx.hashing.config import ResolvedHashConfig
from recfx.hashing.identity import IDENTITY
from recfx.hashing.slice_counts import COUNTS, SLICE_COUNTS, border_at, folded, part_count, parts_between, share
from recfx.hashing.state_errors import torn
from recfx.kernels.index_buffers import BATCHES


def row_cuts(config: ResolvedHashConfig, pieces: int) -> list[int]:
    """The borders that cut a table into slices of similar size: ``pieces + 1`` of them, from 0 to ``rows``.

    The borders ascend; slices may be empty. Border ``k`` is the row at which the part of row ``k * rows // pieces``
    begins: its bucket, or, of up to 1,024 dense rows, the row itself.
    """
    if pieces < 1:
        raise ValueError(f"a table is cut into at least one piece, not {pieces}")
    return [border_at(config, piece * config.rows // pieces) for piece in range(pieces + 1)]


def slice_state(
    config: ResolvedHashConfig, state: Mapping[str, Tensor], row_begin: int, row_end: int
) -> dict[str, Tensor]:
    """Cut the state of the slice ``[row_begin, row_end)`` out of the state of a whole table.

    Args:
        config: the configuration of the table.
        state: tensors by buffer name, as in the ``state_dict`` of an index.

    Returns:
        Views of the rows, and a copy of ``counts``, which has the table's number of batches and the slice's share of
        its statistics.
    """
    parts = state.get(SLICE_COUNTS)
    if parts is not None and parts.size(0) != part_count(config):  # of a table with other buckets
        state = folded(state)
    own = parts_between(config, row_begin, row_end)
    piece = {}
    for name, value in state.items():
        if name == COUNTS:
            piece[name] = share(config, value, row_begin, row_end)
        elif name == SLICE_COUNTS:
            piece[name] = value[own.start : own.stop]
        else:
            piece[name] = value if name == IDENTITY else value[row_begin:row_end]
    return piece


def join_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the states of a table's slices, given in the order of their rows, to the state of the whole table.

    Its ``counts`` have the highest number of batches and the sums of the statistics; its ``slice_counts`` are zeros.

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
