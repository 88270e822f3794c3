"""``keyed_tensor``: puts pooled columns into TorchRec's output type, in the standard collection's key order.

``ColumnOrder`` joins pooled parts into one tensor, here and in ``output_dist``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from recfx.ir.tables import Columns
from recfx.runtime.base import NodeModule

_NOBODY = -1


class ColumnOrder:
    """Concatenates column ranges of the parts; columns that are adjacent both before and after stay together.

    The columns are those in ``order``; those that no part holds are zeros.
    """

    def __init__(self, parts: list[list[Columns]], order: list[Columns]) -> None:
        place = {columns: position for position, columns in enumerate(order)}
        after = {columns: order[position + 1] for columns, position in place.items() if position + 1 < len(order)}
        self._widths: list[list[int]] = []  # the widths of the ranges of each part
        where: dict[Columns, tuple[int, int]] = {}  # the first columns of a range: part, number of the range
        inside: set[Columns] = set()  # columns that are not the first in their range
        for number, part in enumerate(parts):
            widths: list[int] = []
            last: Columns | None = None
            for columns in part:
                if last is not None and after.get(last) == columns:
                    widths[-1] += columns.dim
                    inside.add(columns)
                else:
                    where[columns] = (number, len(widths))
                    widths.append(columns.dim)
                last = columns
            self._widths.append(widths)
        self._dtype = functools.reduce(torch.promote_types, {columns.dtype for columns in order} or {torch.float32})
        self._pieces: list[tuple[int, int]] = []  # part and number of its range; or _NOBODY and a width
        for columns in order:
            if columns in inside:
                continue
            piece = where.get(columns, (_NOBODY, columns.dim))
            if piece[0] == _NOBODY and self._pieces and self._pieces[-1][0] == _NOBODY:
                piece = (_NOBODY, self._pieces.pop()[1] + columns.dim)
            self._pieces.append(piece)

    @property
    def ranges(self) -> int:
        """How many ranges are copied per row; none is copied if there is only one."""
        return len(self._pieces)

    def __call__(self, parts: Sequence[torch.Tensor], batch_size: int, device: torch.device) -> torch.Tensor:
        """Join ``[B, sum dim]`` parts to ``[B, sum of the dims in order]``.

        ``batch_size`` and ``device`` are those of the result if there are no parts.
        """
        # Split rather than narrow: in the backward, each narrow would create a tensor of the whole size.
        stretches = [
            (part,) if len(widths) == 1 else part.split(widths, dim=1)
            for part, widths in zip(parts, self._widths, strict=True)
        ]
        pieces = [
            self._zeros(parts, batch_size, piece, device) if part == _NOBODY else stretches[part][piece]
            for part, piece in self._pieces
        ]
        if not pieces:
            return self._zeros(parts, batch_size, 0, device)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _zeros(self, parts: Sequence[torch.Tensor], batch_size: int, width: int, device: torch.device) -> torch.Tensor:
        if parts:
            return parts[0].new_zeros(batch_size, width)
        return torch.zeros(batch_size, width, dtype=self._dtype, device=device)


class AssembleKeyedTensor(NodeModule):
    """Concatenate pooled parts and name their columns."""

    def __init__(self, keys: list[str], dims: list[int], parts: list[list[Columns]]) -> None:
        super().__init__()
        self.keys = keys
        self.dims = dims
        self.order = keyed_order(keys, parts)

    def forward(self, *pooled: torch.Tensor) -> KeyedTensor:
        """``pooled``: one ``[B, sum D]`` tensor per input. Returns the ``[B, D]`` keyed tensor."""
        values = self.order(pooled, pooled[0].shape[0], pooled[0].device)
        return KeyedTensor(keys=self.keys, length_per_key=self.dims, values=values)


def keyed_order(keys: Sequence[str], parts: list[list[Columns]]) -> ColumnOrder:
    """The order of an output's columns."""
    position = {key: number for number, key in enumerate(keys)}
    arrived = [columns for part in parts for columns in part]
    return ColumnOrder(parts, sorted(arrived, key=lambda columns: (position[columns.key], columns.first)))
