"""``bucketize``, ``input_dist_start`` and ``input_dist_wait``: ids travel to the ranks whose shards they read.

If rows are cut, ``bucketize`` first sends each id to the rank that owns its row or its bucket of rows. There is one
all-to-all for all tables of a collection, whatever their sharding types are: each rank receives the features of its
shards, one after the other. A feature is sent once for each shard that reads it, so the features of a replicated table
go to every rank. Sizes are sent first, together with each rank's mark (see ``marks``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import (
    KJTAllToAll,
    KJTAllToAllSplitsAwaitable,
    KJTAllToAllTensorsAwaitable,
    _get_recat,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTSplitsAllToAllMeta
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.kernels.route.bucketize import Routes, bucketize
from recfx.kernels.route.from_zero import from_zero
from recfx.runtime import marks
from recfx.runtime.bags import FBGEMM_PERMUTES_ON, as_sent, permute_features, select_bags, without_weights
from recfx.runtime.base import NodeModule
from recfx.runtime.marks import Backwards
from recfx.versions.differences import KJTAllToAllForward


class Bucketize(NodeModule):
    """Copy each feature to the ranks of its shards; if rows are cut, each id goes to only one of them.

    Args:
        routes: one per output key, rank by rank: see ``recfx.kernels.route.bucketize``.
        keys: the names of the output keys.
        says_origins: whether the weights of the result are the positions of its ids among those of ``features``, int64.
        on_host: whether ids whose origins are said are copied to the host.
    """

    def __init__(self, routes: Routes, keys: list[str], says_origins: bool = False, on_host: bool = False) -> None:
        super().__init__()
        self.routes = routes
        self.keys = keys
        self.says_origins, self.on_host = says_origins, on_host

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
    """The context of one collection and one batch. ``batch_size_per_rank`` is known once ids have arrived.

    TorchRec's pipelines wait for the ids themselves, and then fill it in like ``input_dist_wait``.

    Attributes:
        output_splits: the marks of all ranks (see ``marks``). TorchRec's awaitables fill in an attribute of this name.
        backwards: those of the collection that is called, and the number of the call.
        ids_sent: of each key that was sent, rank by rank, the number of ids, if their rows come back one by one; so too
            the next two.
        origins: int64 ``[sum of ids_sent]``, the position of each id that was sent among the selected ids; None if all
            keys were sent as a whole.
        ids_arrived: of each key that has arrived, the number of ids from each rank.
    """

    def __init__(
        self, batch_size_per_feature_pre_a2a: Sequence[int] = (), backwards: tuple[Backwards, int] | None = None
    ) -> None:
        super().__init__(batch_size_per_feature_pre_a2a=list(batch_size_per_feature_pre_a2a))
        self.output_splits: list[int] = []
        self.backwards = backwards or (Backwards(""), 0)
        self.ids_sent: list[int] = []
        self.origins: torch.Tensor | None = None
        self.ids_arrived: list[list[int]] = []


class Call(NamedTuple):
    """What one call sends.

    Args:
        sent: its ids, rank by rank, of one batch size: int64, with lengths of int64 and, if any, weights of float32.
        splits: how many of its keys each rank receives.
        mark: see ``marks``.
        context: gets the marks of all ranks when sizes have arrived, and their batch sizes when ids have.
    """

    sent: KeyedJaggedTensor
    splits: list[int]
    mark: int
    context: DistContext


class Together(Protocol):
    """What sends the ids of several calls in one exchange."""

    def add(self, call: Call) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """See ``JointExchange``."""


class ArrivingIds(KJTAllToAllTensorsAwaitable):
    """Does what TorchRec's class does, without the operators that torch_npu would run on the host."""

    def __init__(self, *, sent: KeyedJaggedTensor, stride_per_rank: list[int], **arguments: Any) -> None:
        # Without batch sizes, TorchRec does not expand the order of features to one of bags, which is FBGEMM's part.
        super().__init__(input=sent, stride_per_rank=None, stagger=1, **arguments)
        self._stride_per_rank = stride_per_rank

    def _wait_impl(self) -> KeyedJaggedTensor:
        for awaitable in self._awaitables:
            awaitable.wait()
        lengths, values, *weights = self._output_tensors
        return in_order_of_features(self._keys, lengths, values, weights[0] if weights else None, self._stride_per_rank)


def arrived_ids(
    keys: list[str],
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    stride_per_rank: list[int],
) -> KeyedJaggedTensor:
    """Do what ``in_order_of_features`` does, by FBGEMM's operators where they run, as in TorchRec."""
    if not _torchrec_orders(values.device, stride_per_rank):
        return in_order_of_features(keys, lengths, values, weights, stride_per_rank)
    ranks = len(stride_per_rank)
    return KeyedJaggedTensor.dist_init(
        keys=keys,
        tensors=[lengths, values] if weights is None else [lengths, values, weights],
        variable_stride_per_key=False,
        num_workers=ranks,
        recat=_get_recat(len(keys), ranks, 1, values.device, stride_per_rank),
        stride_per_rank=stride_per_rank,
    )


def _torchrec_orders(device: torch.device, stride_per_rank: list[int]) -> bool:
    """Whether TorchRec can put the ids into order, which 1.2 cannot if no rank has a sample."""
    return device.type in FBGEMM_PERMUTES_ON and any(stride_per_rank)


def in_order_of_features(
    keys: list[str],
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    stride_per_rank: list[int],
) -> KeyedJaggedTensor:
    """Reorder ids that came rank by rank; the host does not wait for the device.

    Args:
        keys: the ``F`` features.
        lengths: int64 ``[F * B]``, ordered by rank, feature and sample; ``B`` is the sum of ``stride_per_rank``.
        values, weights: ``[n]``, in the same order; weights may be None.
        stride_per_rank: the batch size of each rank.

    Returns a KJT ordered by feature, rank and sample, with offsets.
    """
    features, batch = len(keys), sum(stride_per_rank)
    offsets = from_zero(lengths, values.numel())
    arrived = KeyedJaggedTensor(["arrived"], values, weights, lengths=lengths, offsets=offsets, stride=lengths.numel())
    positions = torch.arange(features * batch, device=values.device)
    by_rank = positions.split([features * stride for stride in stride_per_rank])
    bags = torch.cat([part.view(features, -1) for part in by_rank if part.numel()] or [positions], dim=-1).view(-1)
    values, lengths, offsets, weights = select_bags(arrived, bags, weights, values.numel())
    return KeyedJaggedTensor(keys, values, weights, lengths=lengths, offsets=offsets, stride=batch)


Started: TypeAlias = Awaitable[KJTAllToAllTensorsAwaitable]

# The tensors of a batch, each with a row of sizes: lengths, ids, weights. The row for weights is sent even if there are
# none: the messages of all collections have the same size, so that ranks at different calls can read each other's
# marks.
_TENSORS = 3
# TorchRec's awaitables keep rows of sizes by label, and pass the one labelled "values" on to the context.
_MARKS = "values"


@dataclass
class Outgoing:
    """What a rank sends: its ids, or None if it has no valid ones; and bits of ``marks``."""

    features: KeyedJaggedTensor | None
    says: int = 0


class InputDistStart(NodeModule):
    """Start the all-to-all.

    Args:
        group: the group of all ranks.
        splits: how many keys each rank receives.
        positions: the positions of these keys in the input, rank by rank; None: the input has them in that order.
        keys: their names on the receiving rank.
        collection: fully qualified name of the collection.
        device: the device that the group sends from; ids on a different device are sent from there.
        is_weighted: whether weights travel with the ids.
        rows_return: whether the rows of ids come back one by one. Then the weights of ids are their origins, which do
            not travel.
        number: which of the collections sharded in these groups it is.

    Attributes:
        together: what sends the ids instead, along with those of other collections; None outside of ``sent_by``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        splits: list[int],
        positions: list[int] | None,
        keys: list[str],
        collection: str = "",
        device: torch.device | None = None,
        is_weighted: bool = False,
        rows_return: bool = False,
        number: int = 0,
    ) -> None:
        super().__init__()
        self.positions = positions
        self.rows_return = rows_return
        self.keys = keys
        self.collection = collection
        self._number = number
        self._backwards = Backwards(collection)
        self._device, self._is_weighted = device or torch.device("cpu"), is_weighted
        self._dist = KJTAllToAll(group, splits)  # TorchRec's pipelines recognise it by this name and type
        self.together: Together | None = None
        self.agree_on("")

    def agree_on(self, setting: str) -> None:
        """From now on, refuse a call in which not all ranks have this setting, which is given in words."""
        self.identity = marks.identity(self.collection, self.keys, self._dist._splits, setting, self._number)

    @property
    def backwards_since(self) -> int:
        """A number for the backwards since the last call; 0 without any."""
        return self._backwards.since_call()

    def forget_backwards(self) -> None:
        """Take no backward since the last call for run: what they have trained is replaced on all ranks."""
        self._backwards.forget()

    @property
    def pipeline(self) -> object | None:
        """What a TorchRec pipeline has put in place of the exchange, to send the sizes of all collections at once."""
        forward = self._dist.forward
        return forward if isinstance(forward, KJTAllToAllForward) else None

    def forward(self, features: KeyedJaggedTensor | Outgoing) -> tuple[Started | KJTSplitsAllToAllMeta, DistContext]:
        """``features``: this rank's batch. Returns what ``input_dist_wait`` waits for, and the batch's context."""
        outgoing = features if isinstance(features, Outgoing) else Outgoing(features)
        sent, says = outgoing.features, outgoing.says
        if sent is None:
            sent = self._nothing()
        elif self.positions is not None:
            sent = permute_features(sent, self.positions, self.keys)
        number, run = self._backwards.begin_call()
        context = DistContext(sent.stride_per_key(), (self._backwards, number))
        if self.rows_return:
            context.origins = sent.weights_or_none()
            sent = as_sent(without_weights(sent), self._device.type == "cpu")
            context.ids_sent = sent.length_per_key()
        mark = self.identity | marks.says(self.training, run) | says
        return self._start(sent, mark, context), context

    def _start(
        self, sent: KeyedJaggedTensor, mark: int, context: DistContext
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]] | KJTSplitsAllToAllMeta:
        dist_module = self._dist
        if self.together is not None:
            return self.together.add(Call(as_sent(sent), dist_module._splits, mark, context))
        ranks, splits = len(dist_module._splits), sent.dist_splits(dist_module._splits)
        rows = [*splits, *[[0] * ranks] * (_TENSORS - len(splits)), [mark] * ranks]
        labels = [*sent.dist_labels(), *["padding"] * (_TENSORS - len(splits)), _MARKS]
        if self.pipeline is not None:
            started: KJTSplitsAllToAllMeta = dist_module(sent)
            strides = started.splits_tensors[-1]
            started.splits_tensors = [*(torch.tensor(row, device=started.device) for row in rows), strides]
            started.input_splits, started.labels = rows, labels
            return started
        rank = dist.get_rank(dist_module._pg)
        begin = sum(dist_module._splits[:rank])
        with torch.no_grad():
            return _Sizes(
                pg=dist_module._pg,
                input=sent,
                splits=dist_module._splits,
                labels=labels,
                tensor_splits=rows,
                input_tensors=sent.dist_tensors(),
                keys=sent.keys()[begin : begin + dist_module._splits[rank]],
                device=sent.device(),
                stagger=dist_module._stagger,
                collection=self.collection,
            )

    def _nothing(self) -> KeyedJaggedTensor:
        none = torch.zeros(0, dtype=torch.int64, device=self._device)
        weights = torch.zeros(0, device=self._device) if self._is_weighted else None
        return KeyedJaggedTensor(self.keys, none, weights, lengths=none, stride=0)


class InputDistWait(NodeModule):
    """Wait for the ids of all ranks' batches, ordered by feature, rank and sample.

    Args:
        rows_return: whether the rows of ids go back one by one.
    """

    def __init__(self, rows_return: bool = False) -> None:
        super().__init__()
        self.rows_return = rows_return

    def forward(
        self, started: Started | KeyedJaggedTensor, context: DistContext
    ) -> tuple[KeyedJaggedTensor, DistContext]:
        """``started``: what ``input_dist_start`` returned, or the ids, if a pipeline has already waited for them.

        Raises:
            OutOfStepError: ``ranks_at_different_calls``.
        """
        if isinstance(started, KeyedJaggedTensor):
            ids = started
        else:
            tensors = started.wait()
            context.batch_size_per_rank = tensors._stride_per_rank
            context.output_splits = tensors._output_splits[_MARKS]
            ids = tensors.wait()
        if self.rows_return:
            context.ids_arrived = _ids_per_rank(ids, context.batch_size_per_rank)
        return ids, context


def _ids_per_rank(ids: KeyedJaggedTensor, strides: list[int]) -> list[list[int]]:
    """The number of ids of each key from each rank, of ids that are ordered by key, rank and sample."""
    keys = len(ids.keys())
    by_rank = ids.lengths().view(keys, sum(strides)).split(strides, dim=1)
    return torch.stack([lengths.sum(dim=1) for lengths in by_rank], dim=1).tolist()


class _Sizes(KJTAllToAllSplitsAwaitable):
    """Sizes in transit. Ids follow only if all ranks make the same call; otherwise the sizes mean different things."""

    def __init__(self, *, collection: str, **arguments: object) -> None:
        super().__init__(**arguments)
        self._collection = collection

    def _wait_impl(self) -> KJTAllToAllTensorsAwaitable:
        if self._workers > 1:
            *splits, strides = self._splits_awaitable.wait()
            different = marks.other_calls(splits[-1], self._collection)
            if different is not None:
                raise different
            if not _torchrec_orders(self._device, strides):
                return ArrivingIds(
                    pg=self._pg,
                    sent=self._input,
                    splits=self._splits,
                    input_splits=self._input_splits,
                    output_splits=splits,
                    input_tensors=self._input_tensors,
                    labels=self._labels,
                    keys=self._keys,
                    device=self._device,
                    stride_per_rank=strides,
                )
        return super()._wait_impl()
