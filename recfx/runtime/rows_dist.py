"""``output_dist_start`` for rows that are not pooled: each goes back to the rank that its id came from.

``RowsAllToAll`` is the inverse of the one exchange of ids, whatever the sharding types are: widths of shards differ, so
messages are flat. ``OwnRows`` is for replicas, which have looked up the ids of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torchrec.distributed.comm_ops import alltoall_sequence
from torchrec.distributed.types import Awaitable, NoWait

from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import Columns
from recfx.ir.ways_back import WayBack
from recfx.runtime.input_dist import DistContext
from recfx.runtime.lowered import Lowered
from recfx.runtime.output_dist import OutputDistStart, TakeOwn


class ArrivingKey(NamedTuple):
    """The rows of one key that one rank sends back: that rank; the position of the key among all keys that ids are sent
    of, rank by rank, and among the keys of the way back; the first of the columns that arrive, and the column after the
    last.
    """

    rank: int
    sent: int
    key: int
    columns: tuple[int, int]


@dataclass(frozen=True)
class RowKeys:
    """The keys of one way back, as one rank sees them. Keys that are here are those whose ids arrive here."""

    # For each input of the node, the positions of its keys among those that are here
    parts: tuple[tuple[int, ...], ...]
    # These positions in the order in which rows are sent, each with the number of its columns
    own: tuple[tuple[int, int], ...]
    arriving: tuple[ArrivingKey, ...]  # what the ranks send here, in order
    # For each key of the collection, positions of sent keys that together have each of its ids once
    whole: tuple[tuple[int, ...], ...]
    keys: tuple[int, ...]  # the positions of the keys of this way back among the keys of the collection
    dim: int  # the number of columns of all keys

    @classmethod
    def of(cls, sharding: CollectionSharding, way: WayBack, parts: Sequence[Sequence[Columns]]) -> RowKeys:
        """``parts``: the columns of each input of the node."""
        every = [key for table in sharding.tables for key in table.table.output_keys]
        keys = [key for table in sharding.tables_of(way) for key in table.output_keys]
        here = [column for shard in sharding.local() for column in shard.output_columns]
        sent = [(shard, column.key) for shard in sharding.by_rank() for column in shard.output_columns]
        whole: dict[str, dict[tuple[int, int], int]] = {key: {} for key in every}
        for number, (shard, key) in enumerate(sent):
            if shard.columns[0] == 0:
                whole[key].setdefault(shard.rows, number)
        return cls(
            parts=tuple(tuple(here.index(column) for column in part) for part in parts),
            own=tuple((number, column.dim) for number, column in enumerate(here) if column.key in keys),
            arriving=tuple(
                ArrivingKey(shard.rank, number, keys.index(key), shard.columns)
                for number, (shard, key) in enumerate(sent)
                if key in keys
            ),
            whole=tuple(tuple(numbers.values()) for numbers in whole.values()),
            keys=tuple(map(every.index, keys)),
            dim=sharding.tables_of(way)[0].embedding_dim,
        )


class _RowsStart(OutputDistStart):
    """Rows of ids, by the rank that they go to, then by key."""

    def __init__(self, of: Lowered) -> None:
        super().__init__(of)
        self.keys = RowKeys.of(of.sharding, of.collection.way(str(of.node.kwargs["way"])), of.parts)

    def join(self, parts: list[Any], context: DistContext) -> torch.Tensor:
        """``[numbers, 1]``: one message after the other. ``parts`` are tuples, of a tensor for each key."""
        if not parts:
            return torch.zeros(0, 1, device=self.device)
        return _Messages.apply(self.keys, context.ids_arrived, *chain.from_iterable(parts))

    def sizes(self, context: DistContext) -> list[int]:
        counts = context.ids_arrived
        return [sum(counts[key][rank] * dim for key, dim in self.keys.own) for rank in range(self.group.size())]


class RowsAllToAll(_RowsStart):
    """Every rank sends the rows of its shards to where their ids came from, and puts together what arrives."""

    operation = "rows_all_to_all"

    def send(self, joined: torch.Tensor, context: DistContext) -> Awaitable[torch.Tensor]:
        """Returns ``[n, D]``, key by key in the order of the ids."""
        none = torch.empty(0, dtype=torch.int64)  # nothing is permuted
        arriving = [0] * self.group.size()
        for key in self.keys.arriving:
            arriving[key.rank] += _numbers(key, context)
        sizes, codecs = self.sizes(context), self.codecs
        numbers = alltoall_sequence(joined, none, none, none, arriving, sizes, group=self.group, codecs=codecs)
        return _InOrderOfIds(numbers, self.keys, context)


class OwnRows(_RowsStart):
    """Takes the rows of this rank's ids out of all. Nothing is sent, but the backward gathers all ranks' gradients."""

    operation = "own_rows"

    def send(self, joined: torch.Tensor, context: DistContext) -> Awaitable[torch.Tensor]:
        """Returns ``[n, D]``, key by key in the order of the ids."""
        sizes = self.sizes(context)
        if len(sizes) > 1:
            joined = TakeOwn.apply(joined, self.group, sizes, self.exchange(context))
        return NoWait(joined.view(-1, self.keys.dim))


class _Messages(torch.autograd.Function):
    """The rows of each key, by the rank that the ids came from, become one message per rank. The backward gives each
    key a gradient, of zeros where no loss depends on it: no rank knows the losses of others. One node is faster than
    autograd's own, of which there would be one for each piece.
    """

    @staticmethod
    def forward(ctx: Any, keys: RowKeys, counts: list[list[int]], *of_keys: torch.Tensor) -> torch.Tensor:
        ctx.keys, ctx.counts = keys, counts
        positions = chain.from_iterable(keys.parts)
        rows = {key: of_key.split(counts[key]) for key, of_key in zip(positions, of_keys, strict=True)}
        pieces = [rows[key][rank].reshape(-1) for rank in range(len(counts[0])) for key, _ in keys.own]
        return torch.cat(pieces).unsqueeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        keys, counts = ctx.keys, ctx.counts
        places = [(key, rank, dim) for rank in range(len(counts[0])) for key, dim in keys.own]
        pieces = gradient.reshape(-1).split([counts[key][rank] * dim for key, rank, dim in places])
        rows: dict[int, list[torch.Tensor]] = {key: [] for key, _ in keys.own}  # by key, from each rank
        for (key, _, dim), piece in zip(places, pieces, strict=True):
            rows[key].append(piece.view(-1, dim))
        return None, None, *(torch.cat(rows[key]) for key in chain.from_iterable(keys.parts))


class _Block(NamedTuple):
    """Rows of the same columns among the numbers that have arrived: these columns, where the numbers are, and where the
    rows belong, int64 ``[n]``.
    """

    columns: tuple[int, int]
    ranges: list[tuple[int, int]]
    places: torch.Tensor


class _InOrderOfIds(Awaitable[torch.Tensor]):
    """Receives the messages of all ranks, and puts blocks of columns and pieces of rows into their places."""

    def __init__(self, numbers: Awaitable[torch.Tensor], keys: RowKeys, context: DistContext) -> None:
        super().__init__()
        self._tensor_awaitable, self._keys, self._context = numbers, keys, context

    def _wait_impl(self) -> torch.Tensor:
        numbers, keys, sent = self._tensor_awaitable.wait(), self._keys, self._context.ids_sent
        counts = [sum(sent[number] for number in numbers_of) for numbers_of in keys.whole]
        begins = [0, *accumulate(counts[key] for key in keys.keys)]
        places = self._places([0, *accumulate(counts)], begins)
        ends = [0, *accumulate(_numbers(key, self._context) for key in keys.arriving)]
        blocks: dict[tuple[int, int], list[int]] = {}
        for position, key in enumerate(keys.arriving):
            blocks.setdefault(key.columns, []).append(position)
        return _PutInPlace.apply(
            numbers,
            [
                _Block(
                    columns,
                    _joined([(ends[position], ends[position + 1]) for position in positions]),
                    torch.cat([places[position] for position in positions]).to(numbers.device, non_blocking=True),
                )
                for columns, positions in blocks.items()
            ],
            (begins[-1], keys.dim),
        )

    def _places(self, begins_of_all: list[int], begins: list[int]) -> list[torch.Tensor]:
        """Where the rows of each arriving key belong, given where the ids of each key of the collection begin, and the
        rows of each key of the way back.
        """
        keys, sent, origins = self._keys, self._context.ids_sent, self._context.origins
        if origins is None:
            return [torch.arange(begins[key.key], begins[key.key] + sent[key.sent]) for key in keys.arriving]
        by_key = origins.split(sent)
        shifts = [begins_of_all[number] - begin for number, begin in zip(keys.keys, begins, strict=False)]
        return [by_key[key.sent] - shifts[key.key] if shifts[key.key] else by_key[key.sent] for key in keys.arriving]


class _PutInPlace(torch.autograd.Function):
    """Every number that has arrived has one place, so the order in which they are put there does not matter."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, blocks: list[_Block], shape: tuple[int, int]) -> torch.Tensor:
        ctx.blocks, ctx.shape = blocks, numbers.shape
        numbers, rows = numbers.view(-1), numbers.new_empty(shape)
        for (first, last), ranges, places in blocks:
            pieces = [numbers[begin:end] for begin, end in ranges]
            block = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(-1, last - first)
            rows[:, first:last].index_copy_(0, places, block)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        numbers = gradient.new_empty(ctx.shape)
        flat = numbers.view(-1)
        for (first, last), ranges, places in ctx.blocks:
            block = gradient[:, first:last].index_select(0, places).view(-1)
            pieces = block.split([end - begin for begin, end in ranges])
            for (begin, end), piece in zip(ranges, pieces, strict=True):
                flat[begin:end] = piece
        return numbers, None, None


def _numbers(key: ArrivingKey, context: DistContext) -> int:
    first, last = key.columns
    return context.ids_sent[key.sent] * (last - first)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined = ranges[:1]
    for begin, end in ranges[1:]:
        if begin == joined[-1][1]:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined
