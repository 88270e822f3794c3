"""Route the ids of a batch to the pieces of their tables: which rank gets which ids when tables are cut by rows.

``bucketize`` calls the C++ operator (``csrc/route/bucketize.cpp``); ``library.load()`` must have been called first.
``bucketize_reference.py`` implements the same contract.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import library

WHOLE = -1
"""Instead of a piece: all ids of the feature, unchanged."""


class Routes(NamedTuple):
    """How the ids of each input feature map to pieces, and what each entry of the output holds.

    The piece of an id is the one that holds its home row. If the ids of a table are its rows (``buckets`` is 0), the
    home row is the id itself; if the table has an index, it is what ``buckets.home_rows`` returns. Empty pieces hold no
    ids.
    """

    row_borders: list[list[int]]  # per feature: where pieces begin, ascending from 0 to rows; []: not cut
    dense_rows: list[int]  # of each feature's table, as are the next three
    rows: list[int]
    buckets: list[int]  # 0: ids are rows
    seeds: list[int]
    sources: list[int]  # per entry: its feature; may repeat
    pieces: list[int]  # per entry: WHOLE, or a piece of the feature


def bucketize(
    ids: Tensor, lengths: Tensor, batch_size: int, routes: Routes, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sort ids by entry, then by bag, keeping their order within a bag.

    Takes linear time; the result does not depend on the number of threads.

    If a table without an index is cut, its ids leave as rows of the piece: the id minus the piece's first row. All
    other ids leave unchanged.

    Args:
        ids: int64 ``[n]`` on the CPU, feature by feature and bag by bag.
        lengths: int32 or int64 ``[F * B]``, the number of ids in each bag.
        batch_size: ``B``.
        routes: see ``Routes``.
        weights: floats ``[n]``, one per id.

    Returns:
        ids: int64, entry by entry.
        lengths: ``[entries * B]``, the number of ids in each bag of each entry, in the dtype of ``lengths``.
        weights: one per id of the output, or None if no weights were given.

    Raises:
        IndexError: a feature is cut, its ids are rows, and one of them is out of range. The message names the number of
            the feature and the first such id.
        RuntimeError: the arguments do not fit together.
    """
    ids_out, lengths_out, weights_out = torch.ops.recfx.bucketize(ids, lengths, batch_size, *flat(routes), weights)
    return ids_out, lengths_out, None if weights is None else weights_out


def flat(routes: Routes) -> tuple[list[int], ...]:
    """``routes`` as operators take them: all borders, how many each feature has, and the other lists."""
    borders = list(chain.from_iterable(routes.row_borders))
    return borders, list(map(len, routes.row_borders)), *routes[1:]


def fake(
    ids: Tensor,
    lengths: Tensor,
    batch_size: int,
    borders: list[int],
    border_counts: list[int],
    dense_rows: list[int],
    rows: list[int],
    buckets: list[int],
    seeds: list[int],
    sources: list[int],
    pieces: list[int],
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What an operator with this contract returns, without numbers."""
    count = torch.library.get_ctx().new_dynamic_size()
    weights_out = ids.new_empty(0, dtype=torch.float32) if weights is None else weights.new_empty(count)
    return ids.new_empty(count), lengths.new_empty(len(sources) * batch_size), weights_out


@library.when_loaded
def _register_fake() -> None:
    torch.library.register_fake("recfx::bucketize", fake)
