"""Pooled parts joined into one tensor whose columns stand in a wanted order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from recfx.ir.columns import Columns


class _Run(NamedTuple):
    """Columns that stand side by side in a part as in the result; ``part`` -1: zeros, nobody holds them."""

    part: int
    begin: int
    width: int


class ColumnOrder:
    """Concatenates stretches of parts; what is in the right order already is not cut.

    Args:
        parts: the columns of each part, in order.
        wanted: the columns of the result. Those that no part holds are zeros.
    """

    def __init__(self, parts: list[list[Columns]], wanted: list[Columns]) -> None:
        where: dict[Columns, tuple[int, int]] = {}
        widths = []
        for number, part in enumerate(parts):
            begin = 0
            for columns in part:
                where[columns] = (number, begin)
                begin += columns.dim
            widths.append(begin)
        runs: list[_Run] = []
        for columns in wanted:
            number, begin = where.get(columns, (-1, 0))
            last = runs[-1] if runs else None
            adjacent = last is not None and last.part == number and (number < 0 or last.begin + last.width == begin)
            if last is not None and adjacent:
                runs[-1] = last._replace(width=last.width + columns.dim)
            else:
                runs.append(_Run(number, begin, columns.dim))
        self._runs = runs
        self._is_whole = [run.part >= 0 and run.width == widths[run.part] for run in runs]

    def __call__(self, parts: Sequence[torch.Tensor], batch_size: int) -> torch.Tensor:
        """Join.

        Args:
            parts: one ``[B, sum dim]`` a part.
            batch_size: ``B``, for the case that there are none.

        Returns:
            ``[B, sum of the wanted dims]``.
        """
        if not self._runs:
            return torch.zeros(batch_size, 0)
        pieces = [
            self._zeros(run, parts, batch_size)
            if run.part < 0
            else parts[run.part]
            if is_whole
            else parts[run.part].narrow(1, run.begin, run.width)
            for run, is_whole in zip(self._runs, self._is_whole, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _zeros(self, run: _Run, parts: Sequence[torch.Tensor], batch_size: int) -> torch.Tensor:
        if parts:
            return parts[0].new_zeros(batch_size, run.width)
        return torch.zeros(batch_size, run.width, dtype=torch.float32)
