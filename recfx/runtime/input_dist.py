"""``input_dist_start`` and ``input_dist_wait``: ids travel to the ranks whose shards they read.

There is one all-to-all for all tables of a collection, whatever their sharding types are: each rank receives the
features of its shards, one after the other. A feature is sent once for each shard that reads it, so the features of a
replicated table go to every rank. Sizes are sent first, together with each rank's mark (see ``marks``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllSplitsAwaitable, KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding_sharding import KJTSplitsAllToAllMeta
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.runtime import marks
from recfx.runtime.arriving_ids import ArrivingIds
from recfx.runtime.bags import FBGEMM_PERMUTES_ON, permute_features
from recfx.runtime.base import NodeModule
from recfx.runtime.dist_context import DistContext

Started: TypeAlias = Awaitable[KJTAllToAllTensorsAwaitable]

# The tensors of a batch, each with a row of sizes: lengths, ids, weights. The row for weights is sent even if there are
# none: the messages of all collections have the same size, so that ranks at different calls can read each other's
# marks.
_TENSORS = 3
# TorchRec's awaitables keep rows of sizes by label, and pass the one labelled "values" on to the context.
_MARKS = "values"


@dataclass
class Outgoing:
    """What a rank has to send.

    Args:
        features: its ids; None if it has no valid ones.
        says: bits of ``marks``.
    """

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
    ) -> None:
        super().__init__()
        self.positions = positions
        self.keys = keys
        self.collection = collection
        self._device, self._is_weighted = device or torch.device("cpu"), is_weighted
        self._dist = KJTAllToAll(group, splits)  # TorchRec's pipelines recognise it by this name and type
        self.agree_on("")

    def agree_on(self, setting: str) -> None:
        """From now on, refuse a call in which not all ranks have this setting, which is given in words."""
        self.identity = marks.identity(self.collection, self.keys, self._dist._splits, setting)

    @property
    def pipeline(self) -> object | None:
        """What a TorchRec pipeline has put in place of the exchange, to send the sizes of all collections at once."""
        found = self._dist.forward
        return found if isinstance(found, KJTAllToAllForward) else None

    def forward(self, features: KeyedJaggedTensor | Outgoing) -> tuple[Started | KJTSplitsAllToAllMeta, DistContext]:
        """``features``: this rank's batch. Returns what ``input_dist_wait`` waits for, and the batch's context."""
        outgoing = features if isinstance(features, Outgoing) else Outgoing(features)
        sent, says = outgoing.features, outgoing.says
        if sent is None:
            sent = self._nothing()
        elif self.positions is not None:
            sent = permute_features(sent, self.positions, self.keys)
        context = DistContext(batch_size_per_feature_pre_a2a=sent.stride_per_key())
        return self._start(sent, self.identity | says), context

    def _start(self, sent: KeyedJaggedTensor, mark: int) -> Started | KJTSplitsAllToAllMeta:
        dist_module = self._dist
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
    """Wait for the ids of all ranks' batches, ordered by feature, rank and sample."""

    def forward(
        self, started: Started | KeyedJaggedTensor, context: DistContext
    ) -> tuple[KeyedJaggedTensor, DistContext]:
        """``started``: what ``input_dist_start`` returned, or the ids, if a pipeline has already waited for them.

        Raises:
            OutOfStepError: ``ranks_at_different_calls``.
        """
        if isinstance(started, KeyedJaggedTensor):
            return started, context
        tensors = started.wait()
        context.batch_size_per_rank = tensors._stride_per_rank
        context.output_splits = tensors._output_splits[_MARKS]
        return tensors.wait(), context


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
            if self._device.type not in FBGEMM_PERMUTES_ON:
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
