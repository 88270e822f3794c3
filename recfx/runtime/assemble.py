"""What puts a collection's output together: ``keyed_tensor``, ``jagged_dict`` and ``mean_divide``.

``ColumnOrder`` joins pooled parts into one tensor, here and in ``output_dist``.
"""

import functools
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.ir.tables import Columns, KeyOrder, TableSpec, embedding_dims
from recfx.runtime.base import TracedNode
from recfx.runtime.lowered import Lowered

_NOBODY = -1


class ColumnOrder:
    """Concatenates column ranges of the parts; columns that are adjacent both before and after stay together. The
    columns are those in ``order``; those that no part holds are zeros.
    """

    def __init__(self, parts: list[list[Columns]], order: list[Columns]) -> None:
        where: dict[Columns, tuple[int, int]] = {}  # part, and the first column there
        for number, part in enumerate(parts):
            begins = accumulate((columns.dim for columns in part), initial=0)
            where.update({columns: (number, begin) for columns, begin in zip(part, begins, strict=False)})
        ranges: list[list[int]] = []  # part, first column there, width; in the order of the result
        for columns in order:
            number, begin = where.get(columns, (_NOBODY, 0))
            if ranges and ranges[-1][0] == number and (number == _NOBODY or begin == sum(ranges[-1][1:])):
                ranges[-1][2] += columns.dim
            else:
                ranges.append([number, begin, columns.dim])
        of_parts = [sorted(own for own in ranges if own[0] == number) for number in range(len(parts))]
        self._widths = [[width for *_, width in of_part] for of_part in of_parts]
        # Part and number of its range; or _NOBODY and a width.
        self._pieces = [(own[0], own[2] if own[0] == _NOBODY else of_parts[own[0]].index(own)) for own in ranges]
        self._is_part = self._pieces == [(0, 0)] and [len(widths) for widths in self._widths] == [1]
        self._dtype = functools.reduce(torch.promote_types, {columns.dtype for columns in order} or {torch.float32})

    @property
    def ranges(self) -> int:
        """How many ranges are copied per row; none is copied if there is only one."""
        return len(self._pieces)

    def __call__(self, parts: Sequence[torch.Tensor], batch_size: int, device: torch.device) -> torch.Tensor:
        """Join ``[B, sum dim]`` parts to ``[B, sum of the dims in order]``. ``batch_size`` and ``device`` are those of
        the result if there are no parts.
        """
        if self._is_part:
            return parts[0]
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


class AssembleKeyedTensor(TracedNode):
    """Concatenate pooled parts and name their columns."""

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        self.keys, self.dims = list(of.collection.keys), embedding_dims(of.collection.tables)
        self.order = keyed_order(self.keys, [of.graph.columns(node) for node in of.node.all_input_nodes])

    def forward(self, *pooled: torch.Tensor) -> KeyedTensor:
        """``pooled``: one ``[B, sum D]`` tensor per input. Returns the ``[B, D]`` keyed tensor."""
        values = self.order(pooled, pooled[0].shape[0], pooled[0].device)
        return KeyedTensor(keys=self.keys, length_per_key=self.dims, values=values)


def keyed_order(keys: Sequence[str], parts: list[list[Columns]]) -> ColumnOrder:
    """The order of an output's columns."""
    position = {key: number for number, key in enumerate(keys)}
    arrived = [columns for part in parts for columns in part]
    return ColumnOrder(parts, sorted(arrived, key=lambda columns: (position[columns.key], columns.first)))


_own_node = torch.ops.aten._unsafe_view.default


class AssembleJaggedDict(TracedNode):
    """Give each key its rows, with the lengths of its feature. If the collection is sharded, all parts get gradients as
    soon as any key gets one, because ranks wait for each other in the backwards of all of them.
    """

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        self.keys, self.need_indices = list(of.collection.keys), of.collection.need_indices
        self.parts = [[columns.key for columns in part] for part in of.parts]  # whose rows each input has
        self.all_train = of.collection.sharding is not None

    def forward(
        self, *arguments: tuple[torch.Tensor, ...] | torch.Tensor | KeyedJaggedTensor
    ) -> dict[str, JaggedTensor]:
        """``arguments``: the parts, then the ids, with keys in the order of the output. A part is a tuple with ``[n,
        D]`` rows for each key, from a lookup; or one tensor, key by key, if they have arrived from other ranks. Returns
        a ``JaggedTensor`` per key: a row per id, and ids as weights if they are needed.
        """
        *parts, ids = arguments
        assert isinstance(ids, KeyedJaggedTensor)
        counts = dict(zip(self.keys, ids.length_per_key(), strict=True))
        # `to_dict` fails for a batch size of 0.
        lengths = dict(zip(self.keys, ids.lengths().split(ids.stride_per_key()), strict=True))
        of_key = dict(zip(self.keys, ids.values().split(list(counts.values())), strict=True))
        rows: dict[str, torch.Tensor] = {}
        for keys, part in zip(self.parts, parts, strict=True):
            pieces = part.split([counts[key] for key in keys]) if isinstance(part, torch.Tensor) else part
            rows.update(zip(keys, pieces, strict=True))
        if self.all_train and len(parts) > 1:
            rows = dict(zip(rows, _Together.apply(*rows.values()), strict=True))
        # A node of its own for each key: hooks of keys that the loss does not use are not called. It is not a view, and
        # may be changed in place.
        rows = {
            key: _own_node(tensor, tensor.shape) if tensor.requires_grad else tensor for key, tensor in rows.items()
        }
        return {
            key: JaggedTensor(rows[key], of_key[key] if self.need_indices else None, lengths[key]) for key in self.keys
        }


class _Together(torch.autograd.Function):
    """Hands its tensors on; if any of them gets a gradient, the others get zeros."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


class MeanDivide(TracedNode):
    """Divide the columns of MEAN features by ``max(length, 1)``. Lengths are taken before hashing: an id without a row
    still counts. ``columns`` are those of the input, of ``tables``; ``divided`` names those that are MEAN, and
    ``features`` the output keys of the whole collection, in the order of the KJT's keys.
    """

    def __init__(
        self, tables: tuple[TableSpec, ...], divided: tuple[str, ...], features: tuple[str, ...], columns: list[Columns]
    ) -> None:
        super().__init__()
        self.divided = divided
        self.features = KeyOrder.of(features)
        by_length = set(divided)
        keys = {name for table in tables if table.name in by_length for name in table.embedding_names}
        self._widths: list[int] = []
        self._positions: list[int] = []  # in the KJT; -1 if not divided
        for part in columns:
            position = self.features.positions[part.key] if part.key in keys else -1
            if position < 0 and self._positions and self._positions[-1] < 0:
                self._widths[-1] += part.dim
            else:
                self._widths.append(part.dim)
                self._positions.append(position)

    def forward(self, pooled: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        """``pooled``: ``[B, sum D]``; ``features``: the ids as selected, before hashing. Returns ``[B, sum D]``."""
        batch_size = features.stride()
        lengths = features.lengths().view(len(self.features), batch_size)
        is_plain = type(pooled) is Tensor and not torch.compiler.is_compiling()
        if pooled.device.type not in ("cpu", "meta") and is_plain:  # fake ones must not be kept
            # However many features are averaged, the host starts as many operators.
            one = _one(batch_size, lengths.dtype, lengths.device)
            divisors = torch.cat([lengths.clamp(min=1), one]).to(pooled.device, pooled.dtype)
            rows = _rows_of_columns(tuple(self._widths), tuple(self._positions), len(self.features), pooled.device)
            return pooled / divisors.index_select(0, rows).t()
        divisors = lengths.clamp(min=1).to(pooled.device, pooled.dtype)
        parts = [
            part if position < 0 else part / divisors[position].unsqueeze(1)
            for part, position in zip(pooled.split(self._widths, dim=1), self._positions, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@lru_cache(maxsize=256)
def _rows_of_columns(widths: tuple[int, ...], positions: tuple[int, ...], other: int, device: torch.device) -> Tensor:
    """int64 ``[sum of the widths]``: of each column, its position; ``other`` where that is negative."""
    rows = torch.tensor([other if position < 0 else position for position in positions], device="cpu")
    return rows.repeat_interleave(torch.tensor(widths, device="cpu")).to(device)


@lru_cache(maxsize=256)
def _one(batch_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The lengths of a feature that is not divided."""
    return torch.ones(1, batch_size, dtype=dtype, device="cpu").to(device)
