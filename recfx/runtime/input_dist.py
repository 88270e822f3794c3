"""``bucketize``, ``input_dist_start`` and ``input_dist_wait``: ids travel to the ranks whose shards they read.

If rows are cut, ``bucketize`` first sends each id to the rank that owns its row or its bucket of rows. There is one
all-to-all for all tables of a collection, whatever their sharding types are: each rank receives the features of its
shards, one after the other. A feature is sent once for each shard that reads it, so the features of a replicated table
go to every rank. ``Exchange`` is what sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import _get_recat
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import OutOfStepError
from recfx.kernels.route.bucketize import Routes, bucketize
from recfx.kernels.route.from_zero import from_zero
from recfx.runtime import marks
from recfx.runtime.bags import FBGEMM_PERMUTES_ON, as_sent, permute_features, select_bags, without_weights
from recfx.runtime.base import NodeModule
from recfx.runtime.dist_groups import sent_on
from recfx.runtime.lowered import Lowered
from recfx.runtime.marks import Backwards


class Bucketize(NodeModule):
    """Copy each feature to the ranks of its shards; if rows are cut, each id goes to only one of them. If rows
    are not pooled, the weights of the result are the positions of its ids among those of ``features``, int64.
    """

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        cut = [table for table in of.sharding.tables for _ in table.table.embedding_names]
        indexed = [sharded.table.hashing if sharded.table.has_index else None for sharded in cut]
        self.routes = Routes(
            row_borders=[sharded.row_borders() for sharded in cut],
            rows=[sharded.table.num_embeddings for sharded in cut],
            dense_rows=[0 if config is None else config.dense_rows for config in indexed],
            buckets=[0 if config is None else config.buckets for config in indexed],
            seeds=[0 if config is None else config.seed for config in indexed], sources=of.sources,
            pieces=[shard.piece for shard in of.sharding.by_rank() for _ in shard.table.embedding_names],
        )  # fmt: skip
        self.keys = list(of.collection.sent_keys)
        self.says_origins, self.on_host = not of.collection.is_pooled, of.collection.ids_on_host

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features``: as selected. Returns rows of the shard if a table has no index, otherwise raw ids."""
        weights = features.weights_or_none()
        if self.says_origins:
            features = as_sent(features, self.on_host)
            weights = torch.arange(features.values().numel(), device=features.values().device)
        values, lengths, weights = bucketize(
            features.values(), features.lengths(), features.stride(), self.routes, weights
        )
        return KeyedJaggedTensor(self.keys, values, weights, lengths=lengths, stride=features.stride())


class DistContext(EmbeddingShardingContext):
    """The context of one collection and one batch. ``batch_size_per_rank`` is known once ids have arrived."""

    def __init__(
        self, batch_size_per_feature_pre_a2a: Sequence[int] = (), backwards: tuple[Backwards, int] | None = None
    ) -> None:
        super().__init__(batch_size_per_feature_pre_a2a=list(batch_size_per_feature_pre_a2a))
        self.output_splits: list[int] = []  # the marks of all ranks (see ``marks``)
        self.backwards = backwards or (Backwards(""), 0)  # of the collection that is called; the number of the call
        # If rows come back one by one: the ids of each key that was sent, rank by rank; the position of each among the
        # selected ids, int64, None if all keys were sent as a whole; and those of each key that come from each rank.
        self.ids_sent: list[int] = []
        self.origins: torch.Tensor | None = None
        self.ids_arrived: list[list[int]] = []


class Call(NamedTuple):
    """What one call sends: its ids, rank by rank, of one batch size (int64, with lengths of int64 and, if any, weights
    of float32); how many of its keys each rank receives; its mark (see ``marks``); and the context that gets the marks
    of all ranks and their batch sizes.
    """

    sent: KeyedJaggedTensor
    splits: list[int]
    mark: int
    context: DistContext


class Exchange:
    """Sends the ids of one call, or of several calls that are known at the same time, to the ranks of their shards.
    Sizes are sent first, together with each rank's mark, in a message that is as long for any calls, so that ranks at
    different calls can read each other's marks. Lengths and ids follow in one message, and weights, if there are any,
    in another. ``add`` a call for each of ``collections``, ``start``, and then wait for what ``add`` has returned.
    """

    def __init__(self, group: dist.ProcessGroup, collections: Sequence[str]) -> None:
        self._group, self._collections = group, collections
        self._calls: list[Call] = []
        self._messages: list[_Message] | None = None
        self._sizes: _Arriving | None = None
        self._arriving: list[_Arriving] | None = None
        self._ids: list[KeyedJaggedTensor] | None = None

    def add(self, call: Call) -> Started:
        """The first wait returns what waits for the ids; it starts sending those of all calls."""
        self._calls.append(call)
        position = len(self._calls) - 1
        return _Later(partial(self._sent, _Later(partial(self._received, position))))

    def start(self) -> None:
        """Start sending sizes. If a call could not be added, this rank is out of step, and sends nothing."""
        calls, ranks = self._calls, self._group.size()
        if len(calls) < len(self._collections):
            return
        if ranks == 1:  # the ids are here, and so are the gradients of weights
            for call in calls:
                call.context.output_splits, call.context.batch_size_per_rank = [call.mark], [call.sent.stride()]
            self._ids = [call.sent for call in calls]
            return
        self._are_weighted = [call.sent.weights_or_none() is not None for call in calls]
        with torch.no_grad():
            splits = [call.sent.dist_splits(call.splits) for call in calls]  # of lengths, ids and weights
            self._messages = [_numbers(calls, splits)]
            if any(self._are_weighted):
                self._messages.append(_weights(calls, splits))
            none = [0] * ranks
            numbers, weights = (*[message.splits for message in self._messages], none)[:2]
            alone = len(calls) == 1
            mark = calls[0].mark if alone else marks.joint([call.mark for call in calls])
            ids, stride = (splits[0][1], calls[0].sent.stride()) if alone else (none, 0)  # of several: see ``_HEAD``
            rows = [numbers, ids, weights, [mark] * ranks, [stride] * ranks]
            device = calls[0].sent.device()
            of_ranks = torch.tensor(
                [number for of_rank in zip(*rows, strict=True) for number in of_rank], device=device
            )
            self._sizes = _Arriving(_Message(of_ranks, [len(rows)] * ranks), [len(rows)] * ranks, self._group)

    def _sent(self, following: Started) -> Any:
        """Wait for the sizes, and start sending the ids of all calls, unless that has been done."""
        if self._arriving is not None or self._ids is not None:
            return following
        if self._sizes is None or self._messages is None:
            raise OutOfStepError(
                f"the ids of {', '.join(self._collections)} travel together, and some of them could not be sent.",
                reason="out_of_step",
                module_path=self._collections[0],
                what_to_do="see the errors of the other collections.",
            )
        self._sizes.work.wait()
        numbers, self._counts, weights, said, self._strides = (
            self._sizes.numbers.view(self._group.size(), -1).t().tolist()
        )
        different = marks.other_calls(said, self._collections[0], self._group)
        if different is not None:
            raise different
        for call in self._calls:
            call.context.output_splits = said  # of several calls, each has its own marks when ids have arrived
        self._arriving = [
            _Arriving(message, of_ranks, self._group)
            for message, of_ranks in zip(
                self._messages, (numbers, weights), strict=False
            )  # weights: all ranks, or none
        ]
        return following

    def _received(self, position: int) -> KeyedJaggedTensor:
        """Wait for the ids of all ranks of all calls; of one of them, ordered by feature, rank and sample."""
        if self._ids is None:
            assert self._arriving is not None
            for message in self._arriving:
                message.work.wait()
            numbers, *weights = (message.numbers.split_with_sizes(message.sizes) for message in self._arriving)
            self._ids = self._taken_apart(numbers, weights)
        return self._ids[position]

    def _taken_apart(
        self, numbers: tuple[torch.Tensor, ...], weights: list[tuple[torch.Tensor, ...]]
    ) -> list[KeyedJaggedTensor]:
        calls, rank = len(self._calls), self._group.rank()
        begins = [sum(call.splits[:rank]) for call in self._calls]
        keys = [
            call.sent.keys()[begin : begin + call.splits[rank]] for call, begin in zip(self._calls, begins, strict=True)
        ]
        if calls == 1:
            head, said = 0, [([stride], [count]) for stride, count in zip(self._strides, self._counts, strict=True)]
        else:
            head = _HEAD * calls
            heads = torch.stack([of_rank[:head] for of_rank in numbers]).view(-1, _HEAD, calls).tolist()
            said = [(strides, counts) for strides, counts, _ in heads]
            for position, call in enumerate(self._calls):
                call.context.output_splits = [of_calls[position] for _, _, of_calls in heads]
        parts = [
            of_rank[head:].split_with_sizes(
                [len(names) * stride for names, stride in zip(keys, strides, strict=True)] + counts
            )
            for of_rank, (strides, counts) in zip(numbers, said, strict=True)
        ]
        weighted = [position for position, is_weighted in enumerate(self._are_weighted) if is_weighted]
        of_weighted = [
            of_rank.split([counts[position] for position in weighted])
            for of_ranks in weights
            for of_rank, (_, counts) in zip(of_ranks, said, strict=True)
        ]
        arrived = []
        for position, call in enumerate(self._calls):
            strides = call.context.batch_size_per_rank = [of_calls[position] for of_calls, _ in said]
            lengths = torch.cat([part[position] for part in parts])
            ids = torch.cat([part[calls + position] for part in parts])
            own = None
            if position in weighted:
                own = torch.cat([part[weighted.index(position)] for part in of_weighted])
            arrived.append(arrived_ids(keys[position], lengths, ids, own, strides))
        return arrived


class _Message(NamedTuple):
    """Numbers, rank by rank, and how many each rank gets."""

    numbers: torch.Tensor
    splits: list[int]


_HEAD = 3  # of several calls, a rank's message begins with the batch size, the number of ids and the mark of each call


def _numbers(calls: list[Call], splits: list[list[list[int]]]) -> _Message:
    """What each rank gets in int64: what ``_HEAD`` says, if there are several calls; then all lengths, and all ids."""
    lengths = [call.sent.lengths().split_with_sizes(sizes[0]) for call, sizes in zip(calls, splits, strict=True)]
    ids = [call.sent.values().split_with_sizes(sizes[1]) for call, sizes in zip(calls, splits, strict=True)]
    of_ranks = [list(of_rank) for of_rank in zip(*lengths, *ids, strict=True)]
    if len(calls) > 1:
        strides, of_calls = [call.sent.stride() for call in calls], [call.mark for call in calls]
        for rank, pieces in enumerate(of_ranks):
            head = [*strides, *(sizes[1][rank] for sizes in splits), *of_calls]
            pieces.insert(0, torch.tensor(head, device=calls[0].sent.device()))
    sizes = [sum(piece.numel() for piece in pieces) for pieces in of_ranks]
    return _Message(torch.cat([piece for pieces in of_ranks for piece in pieces]), sizes)


def _weights(calls: list[Call], splits: list[list[list[int]]]) -> _Message:
    """What each rank gets in float32: the weights of the calls that have weights."""
    of_calls = [
        (weights.split(sizes[1]), sizes[1])
        for call, sizes in zip(calls, splits, strict=True)
        if (weights := call.sent.weights_or_none()) is not None
    ]
    of_ranks = zip(*(pieces for pieces, _ in of_calls), strict=True)
    sizes = [sum(of_rank) for of_rank in zip(*(counts for _, counts in of_calls), strict=True)]
    return _Message(torch.cat([piece for pieces in of_ranks for piece in pieces]), sizes)


class _Arriving:
    """A message in transit; ``sizes`` says how many numbers come from each rank."""

    def __init__(self, message: _Message, sizes: list[int], group: dist.ProcessGroup) -> None:
        self.sizes, self._sent = sizes, message.numbers  # which must stay until it is sent
        self.numbers = self._sent.new_empty(sum(sizes))
        self.work = dist.all_to_all_single(self.numbers, self._sent, sizes, message.splits, group=group, async_op=True)


class _Later(Awaitable[Any]):
    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function

    def _wait_impl(self) -> Any:
        return self._function()


def arrived_ids(
    keys: list[str],
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    stride_per_rank: list[int],
) -> KeyedJaggedTensor:
    """Do what ``in_order_of_features`` does, by FBGEMM's operators where they run, as in TorchRec."""
    if len(keys) == 1:  # they are in order
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=sum(stride_per_rank))
    if values.device.type not in FBGEMM_PERMUTES_ON or not any(stride_per_rank):  # which TorchRec 1.2 cannot order
        return in_order_of_features(keys, lengths, values, weights, stride_per_rank)
    return KeyedJaggedTensor.dist_init(
        keys=keys, tensors=[lengths, values] if weights is None else [lengths, values, weights],
        variable_stride_per_key=False, num_workers=len(stride_per_rank),
        recat=_get_recat(len(keys), len(stride_per_rank), 1, values.device, stride_per_rank),
        stride_per_rank=stride_per_rank,
    )  # fmt: skip


def in_order_of_features(
    keys: list[str],
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    stride_per_rank: list[int],
) -> KeyedJaggedTensor:
    """Reorder ids that came rank by rank; the host does not wait for the device. ``lengths``, int64 ``[F * B]``, and
    the ids and weights are ordered by rank, feature and sample, where ``B`` is the sum of ``stride_per_rank``. Returns
    a KJT of the ``F`` keys ordered by feature, rank and sample, with offsets.
    """
    features, batch = len(keys), sum(stride_per_rank)
    offsets = from_zero(lengths, values.numel())
    arrived = KeyedJaggedTensor(["arrived"], values, weights, lengths=lengths, offsets=offsets, stride=lengths.numel())
    positions = torch.arange(features * batch, device=values.device)
    by_rank = positions.split([features * stride for stride in stride_per_rank])
    bags = torch.cat([part.view(features, -1) for part in by_rank if part.numel()] or [positions], dim=-1).view(-1)
    values, lengths, offsets, weights = select_bags(arrived, bags, weights, values.numel())
    return KeyedJaggedTensor(keys, values, weights, lengths=lengths, offsets=offsets, stride=batch)


Started: TypeAlias = Awaitable[Awaitable[KeyedJaggedTensor]]


@dataclass
class Outgoing:
    """What a rank sends: its ids, or None if it has no valid ones; and bits of ``marks``."""

    features: KeyedJaggedTensor | None
    says: int = 0


class InputDistStart(NodeModule):
    """Start the all-to-all. ``positions`` are those of the keys that leave in the input, rank by rank; None if they are
    in that order. If rows of ids come back one by one (``rows_return``), the weights of ids are their origins, which do
    not travel. ``together`` sends the ids along with those of other collections, within ``sent_by``.
    """

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        collection, sharding, groups = of.collection, of.sharding, of.groups
        by_rank = [sharding.on_rank(rank) for rank in range(sharding.world_size)]
        self._splits = [sum(len(shard.table.embedding_names) for shard in shards) for shards in by_rank]
        self.positions = of.sources if of.graph.puts_keys_into_order(of.node) else None
        self.keys, self.rows_return = list(collection.sent_keys), not collection.is_pooled
        self.collection, self._group, self._number = collection.name, groups.ids, groups.number
        self.backwards = Backwards(collection.name, groups.ids)
        self._device = sent_on(groups.ids)
        self._is_weighted = collection.is_weighted and sharding.world_size > 1
        self.together: Exchange | None = None
        self.agree_on("")

    def agree_on(self, setting: str) -> None:
        """From now on, refuse a call in which not all ranks have this setting, which is given in words."""
        self.identity = marks.identity(self.collection, self.keys, self._splits, setting, self._number)

    def forward(self, features: KeyedJaggedTensor | Outgoing) -> tuple[Started, DistContext]:
        """``features``: this rank's batch. Returns what ``input_dist_wait`` waits for, and the batch's context."""
        outgoing = features if isinstance(features, Outgoing) else Outgoing(features)
        sent, says = outgoing.features, outgoing.says
        if sent is None:
            sent = self._nothing()
        elif self.positions is not None:
            sent = permute_features(sent, self.positions, self.keys)
        number, run = self.backwards.begin_call()
        context = DistContext(sent.stride_per_key(), (self.backwards, number))
        if self.rows_return:
            context.origins = sent.weights_or_none()
            sent = as_sent(without_weights(sent), self._device.type == "cpu")
            context.ids_sent = sent.length_per_key()
        mark = self.identity | marks.says(self.training, run) | says
        exchange = self.together or Exchange(self._group, [self.collection])
        started = exchange.add(Call(sent, self._splits, mark, context))
        if self.together is None:
            exchange.start()
        return started, context

    def _nothing(self) -> KeyedJaggedTensor:
        none = torch.zeros(0, dtype=torch.int64, device=self._device)
        weights = torch.zeros(0, device=self._device) if self._is_weighted else None
        return KeyedJaggedTensor(self.keys, none, weights, lengths=none, stride=0)


class InputDistWait(NodeModule):
    """Wait for the ids of all ranks' batches, ordered by feature, rank and sample."""

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        self.rows_return = not of.collection.is_pooled

    def forward(
        self, started: Started | KeyedJaggedTensor, context: DistContext
    ) -> tuple[KeyedJaggedTensor, DistContext]:
        """``started``: what ``input_dist_start`` returned, or the ids, if a pipeline has already waited for them."""
        ids = started if isinstance(started, KeyedJaggedTensor) else started.wait().wait()
        if self.rows_return:
            strides = context.batch_size_per_rank
            by_rank = ids.lengths().view(len(ids.keys()), sum(strides)).split(strides, dim=1)
            context.ids_arrived = torch.stack([lengths.sum(dim=1) for lengths in by_rank], dim=1).tolist()
        return ids, context
