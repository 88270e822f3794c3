"""The constants of kernels that take all tables of a lookup in one launch, on the tables' device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build.launch import elements_between, numbers_on

_KEPT = 4096  # lookups and tables of one process; an entry is a few numbers per table


class TableLayout(NamedTuple):
    """What does not depend on where the tables are."""

    columns: int  # of the output
    largest_dim: int
    first_columns: Tensor  # int32 [F + 1]: the columns of the output that the features fill
    tables: Tensor  # int32 [F]: the features' tables
    dims: Tensor  # int32 [T]
    row_starts: Tensor  # int64 [T]: the number of each table's first row, counted through all tables


def layout_of(weights: Sequence[Tensor], table_of_feature: Sequence[int], unpooled: bool = False) -> TableLayout:
    """The layout of a lookup.

    Args:
        weights: the tables' ``[rows, dim]`` tensors, on one device.
        table_of_feature: the position of each feature's table.
        unpooled: all features fill the same columns of the output, each some of its rows; all tables have one dim.
    """
    shapes = tuple((weight.shape[0], weight.shape[1]) for weight in weights)
    return layout_of_shapes(weights[0].device, shapes, tuple(table_of_feature), unpooled)


@lru_cache(maxsize=_KEPT)
def layout_of_shapes(
    device: torch.device, shapes: tuple[tuple[int, int], ...], table_of_feature: tuple[int, ...], unpooled: bool = False
) -> TableLayout:
    """``layout_of`` tables of these rows and columns, whatever their elements are."""
    dims = [dim for _, dim in shapes]
    first_columns = [0, *accumulate(dims[table] for table in table_of_feature)]
    row_starts = [0, *accumulate(rows for rows, _ in shapes)][:-1]
    return TableLayout(
        columns=dims[0] if unpooled else first_columns[-1], largest_dim=max(dims),
        first_columns=numbers_on(device, (0,) * len(first_columns) if unpooled else tuple(first_columns), torch.int32),
        tables=numbers_on(device, table_of_feature, torch.int32), dims=numbers_on(device, tuple(dims), torch.int32),
        row_starts=numbers_on(device, tuple(row_starts)),
    )  # fmt: skip


def starts(tensors: Sequence[Tensor], of: Sequence[int] | None = None) -> Tensor:
    """int64 ``[len(of)]``: how many elements after the first tensor each begins (before it, if negative).

    Args:
        tensors: of one dtype, on one device.
        of: positions in ``tensors``; None: all of them, in order.
    """
    chosen = tensors if of is None else [tensors[position] for position in of]
    return numbers_on(tensors[0].device, tuple(elements_between(tensors[0], tensor.data_ptr()) for tensor in chosen))
