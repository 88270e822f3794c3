"""Routes the ids of a batch to the pieces of their tables: which rank gets which ids, where tables are cut by rows.

``bucketize`` calls the C++ operator (``csrc/bucketize.cpp``), which has to be loaded (``library.load()``). The
reference of the same contract is in ``bucketize_reference.py``.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from . import library

WHOLE = -1
"""As a piece: all ids of the feature, as they are."""


class Routes(NamedTuple):
    """How ids map to pieces, by feature that comes in; and what goes out, entry by entry.

    The piece of an id is the one that holds its home row: of a table whose ids are rows (``buckets`` is 0) the id
    itself, of a table with an index what ``buckets.home_rows`` says. Empty pieces hold none.
    """

    row_borders: list[list[int]]  # of each feature: where pieces begin, ascending from 0 to rows; []: it is not cut
    dense_rows: list[int]  # of each feature's table
    rows: list[int]
    buckets: list[int]  # 0: ids are rows
    seeds: list[int]
    sources: list[int]  # of each entry: its feature; may repeat
    pieces: list[int]  # of each entry: WHOLE, or a piece of the feature


def bucketize(
    ids: Tensor, lengths: Tensor, batch_size: int, routes: Routes, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sort ids by entry, then bag; inside a bag they keep their order. Linear time; does not depend on threads.

    Of a cut table without index the rows of the piece go out: the id minus the piece's first row. All other ids go out
    as they are.

    Args:
        ids: int64 ``[n]`` on the CPU, feature by feature, bag by bag.
        lengths: int32 or int64 ``[F * B]``, ids of each bag.
        batch_size: ``B``.
        routes: see there.
        weights: floats ``[n]``, of each id.

    Returns:
        ids: int64.
        lengths: of the entries' bags, ``[entries * B]``, in the dtype of ``lengths``.
        weights: of the ids that go out, if there are any.

    Raises:
        IndexError: an id of a feature that is cut, and whose ids are rows, is none; names the feature's number and the
            first such id.
        RuntimeError: what is given does not fit together.
    """
    borders = list(chain.from_iterable(routes.row_borders))
    counts = list(map(len, routes.row_borders))
    ids_out, lengths_out, weights_out = torch.ops.recfx.bucketize(
        ids, lengths, batch_size, borders, counts, *routes[1:], weights
    )
    return ids_out, lengths_out, None if weights is None else weights_out


@library.when_loaded
def _register_fake() -> None:
    @torch.library.register_fake("recfx::bucketize")
    def _bucketize(
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
        count = torch.library.get_ctx().new_dynamic_size()
        weights_out = ids.new_empty(0, dtype=torch.float32) if weights is None else weights.new_empty(count)
        return ids.new_empty(count), lengths.new_empty(len(sources) * batch_size), weights_out
