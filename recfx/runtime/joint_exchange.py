"""One exchange of ids for several collections, if the ids of all of them are known at the same time.

Alone, a collection sends sizes, lengths, ids and, if there are any, weights: a collective each. Together, collections
send two messages, however many they are, and one more if any ids have weights. The sizes are a message like that of one
collection, so that ranks at different calls can still read each other's marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import SplitsAllToAllAwaitable
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import OutOfStepError
from recfx.runtime import marks
from recfx.runtime.input_dist import Call, arrived_ids

MOST = 31
"""How many calls one exchange takes: what a rank says of each of them is two bits of a number."""


class JointExchange:
    """The exchange of one batch: ``add`` every call, ``start``, and then wait for what ``add`` has returned.

    Args:
        group: all ranks.
        collections: the collection of each call that will be added, in order; at most ``MOST``.
    """

    def __init__(self, group: dist.ProcessGroup, collections: Sequence[str]) -> None:
        self._group, self._collections = group, collections
        self._bits = min(marks.RUN_BITS, 62 // len(collections))  # for what a rank says of each call's backwards
        self._calls: list[Call] = []
        self._messages: list[_Message] = []
        self._sizes: SplitsAllToAllAwaitable | None = None
        self._sent: _Sent | None = None

    def add(self, call: Call) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """The first wait returns what waits for the ids; it starts sending those of all calls."""
        self._calls.append(call)
        return _Sizes(self, len(self._calls) - 1)

    def start(self) -> None:
        """Start sending sizes. If a call could not be added, this rank is out of step, and sends nothing."""
        if len(self._calls) < len(self._collections):
            return
        ranks, bits = self._group.size(), self._bits
        with torch.no_grad():
            self._messages = [_numbers(self._calls, ranks), _weights(self._calls, ranks)]
        rows = [
            *(message.splits for message in self._messages),
            [sum(marks.of_one_call(call.mark) << 2 * position for position, call in enumerate(self._calls))] * ranks,
            [marks.joint([call.mark for call in self._calls])] * ranks,
            [sum(marks.run_of(call.mark, bits) << bits * place for place, call in enumerate(self._calls))] * ranks,
        ]
        device = self._calls[0].sent.device()
        self._sizes = SplitsAllToAllAwaitable([torch.tensor(row, device=device) for row in rows], self._group)

    def send(self) -> _Sent:
        """Wait for the sizes, and start sending the ids of all calls, unless that has been done.

        Raises:
            OutOfStepError: ``ranks_at_different_calls``, ``out_of_step``.
        """
        if self._sent is None:
            if self._sizes is None:
                raise OutOfStepError(
                    f"the ids of {', '.join(self._collections)} travel together, and some of them could not be sent.",
                    reason="out_of_step",
                    module_path=self._collections[0],
                    what_to_do="see the errors of the other collections.",
                )
            *arriving, said, joint, run = self._sizes.wait()
            different = marks.other_calls(joint, self._collections[0])
            if different is not None:
                raise different
            bits = self._bits
            for position, call in enumerate(self._calls):
                call.context.output_splits = [
                    marks.of_call(call.mark, mark, says >> 2 * position, ran >> bits * position & (1 << bits) - 1)
                    for mark, says, ran in zip(joint, said, run, strict=True)
                ]
            self._sent = _Sent(self._group, self._calls, self._messages, arriving)
        return self._sent


class _Message(NamedTuple):
    """Numbers, rank by rank, and how many each rank gets."""

    numbers: torch.Tensor
    splits: list[int]

    @classmethod
    def of(cls, pieces: list[list[torch.Tensor]]) -> _Message:
        """``pieces`` has what each rank gets."""
        splits = [sum(piece.numel() for piece in of_rank) for of_rank in pieces]
        return cls(torch.cat([piece for of_rank in pieces for piece in of_rank]), splits)


def _numbers(calls: list[Call], ranks: int) -> _Message:
    """What each rank gets in int64: batch sizes of all calls, numbers of their ids, their lengths, and their ids."""
    splits = [call.sent.dist_splits(call.splits) for call in calls]
    lengths = [call.sent.lengths().split(sizes[0]) for call, sizes in zip(calls, splits, strict=True)]
    ids = [call.sent.values().split(sizes[1]) for call, sizes in zip(calls, splits, strict=True)]
    strides, device = [call.sent.stride() for call in calls], calls[0].sent.device()
    return _Message.of(
        [
            [
                torch.tensor([*strides, *(sizes[1][rank] for sizes in splits)], device=device),
                *(of_ranks[rank] for of_ranks in (*lengths, *ids)),
            ]
            for rank in range(ranks)
        ]
    )


def _weights(calls: list[Call], ranks: int) -> _Message:
    """What each rank gets in float32: the weights of the calls that have weights."""
    weighted = [
        call.sent.weights().split(call.sent.dist_splits(call.splits)[1])
        for call in calls
        if call.sent.weights_or_none() is not None
    ]
    nothing = torch.zeros(0, device=calls[0].sent.device())
    return _Message.of([[nothing, *(of_ranks[rank] for of_ranks in weighted)] for rank in range(ranks)])


class _Sent:
    """Ids of all calls in transit.

    Args:
        arriving: for each message, how many numbers come from each rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, calls: list[Call], messages: list[_Message], arriving: list[list[int]]
    ) -> None:
        self._calls, self._rank, self._splits = calls, group.rank(), arriving
        self._is_weighted = [call.sent.weights_or_none() is not None for call in calls]
        if not any(self._is_weighted):  # which is so on all ranks
            messages, arriving = messages[:1], arriving[:1]
        self._messages = messages
        self._arriving = [
            message.numbers.new_empty(sum(sizes)) for message, sizes in zip(messages, arriving, strict=True)
        ]
        self._works = [
            dist.all_to_all_single(into, message.numbers, sizes, message.splits, group=group, async_op=True)
            for into, message, sizes in zip(self._arriving, messages, arriving, strict=True)
        ]
        self._ids: list[KeyedJaggedTensor] | None = None

    def ids(self, position: int) -> KeyedJaggedTensor:
        """Wait for the ids of all ranks for one call, ordered by feature, rank and sample."""
        if self._ids is None:
            for work in self._works:
                work.wait()
            self._ids = self._taken_apart()
        return self._ids[position]

    def _taken_apart(self) -> list[KeyedJaggedTensor]:
        calls = len(self._calls)
        keys = [self._keys(call) for call in self._calls]
        of_ranks = self._arriving[0].split(self._splits[0])
        heads = torch.stack([numbers[: 2 * calls] for numbers in of_ranks]).view(-1, 2, calls).tolist()
        parts = [
            numbers[2 * calls :].split(
                [len(names) * stride for names, stride in zip(keys, strides, strict=True)] + counts
            )
            for numbers, (strides, counts) in zip(of_ranks, heads, strict=True)
        ]
        weights = iter(self._weights([counts for _, counts in heads]))
        arrived = []
        for position, call in enumerate(self._calls):
            call.context.batch_size_per_rank = [strides[position] for strides, _ in heads]
            lengths = torch.cat([part[position] for part in parts])
            ids = torch.cat([part[calls + position] for part in parts])
            of_call = next(weights) if self._is_weighted[position] else None
            arrived.append(arrived_ids(keys[position], lengths, ids, of_call, call.context.batch_size_per_rank))
        return arrived

    def _keys(self, call: Call) -> list[str]:
        """The keys of a call that arrive here."""
        begin = sum(call.splits[: self._rank])
        return call.sent.keys()[begin : begin + call.splits[self._rank]]

    def _weights(self, counts: list[list[int]]) -> list[torch.Tensor]:
        """The weights of each call that has any. ``counts`` has the number of ids of each call, by rank."""
        if not any(self._is_weighted):
            return []
        sizes = [[count for count, has in zip(of_rank, self._is_weighted, strict=True) if has] for of_rank in counts]
        of_ranks = [
            numbers.split(of_rank)
            for numbers, of_rank in zip(self._arriving[1].split(self._splits[1]), sizes, strict=True)
        ]
        return [torch.cat(of_call) for of_call in zip(*of_ranks, strict=True)]


class _Sizes(Awaitable[Awaitable[KeyedJaggedTensor]]):
    def __init__(self, exchange: JointExchange, position: int) -> None:
        super().__init__()
        self._exchange, self._position = exchange, position

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        return _Ids(self._exchange.send(), self._position)


class _Ids(Awaitable[KeyedJaggedTensor]):
    def __init__(self, sent: _Sent, position: int) -> None:
        super().__init__()
        self._sent, self._position = sent, position

    def _wait_impl(self) -> KeyedJaggedTensor:
        return self._sent.ids(self._position)
