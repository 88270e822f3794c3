"""``output_dist_start`` and ``output_dist_wait``: rows travel back to the ranks whose samples they are.

For pooled rows there is one class per operation: ``AllToAll`` (a rank has complete sums for its columns),
``ReduceScatter`` (every rank has a part of every sum), ``CrossHost`` (the second hop of rows that are cut within hosts)
and ``OwnBatch`` (every rank has pooled the samples of all ranks). A table's sharding type decides which of them its
pooled rows take. Those for rows that are not pooled are in ``rows_dist.py``. The backwards are collectives as well, and
average gradients over ranks like TorchRec's.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll, PooledEmbeddingsReduceScatter
from torchrec.distributed.types import Awaitable, NoWait, QuantizedCommCodecs

from recfx.ir.tables import total_dim
from recfx.runtime.assemble import ColumnOrder
from recfx.runtime.base import NodeModule
from recfx.runtime.dist_groups import codecs_of
from recfx.runtime.input_dist import DistContext
from recfx.runtime.lowered import Lowered
from recfx.runtime.marks import Backwards, LostRanks

Exchange: TypeAlias = Callable[[], AbstractContextManager[None]]


class OutputDistStart(NodeModule, ABC):
    """Join the rows of this rank and start sending them: ``operation`` is what it does in one word, ``hop`` what is
    sent, ``group`` the ranks that take part, and ``codecs`` what encodes and decodes it, if anything does. On
    ``device``, a rank without inputs creates what it sends; the group's backend may support no other.
    """

    operation: ClassVar[str]

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        self.hop = hop = of.graph.hop(of.node)
        self.group: dist.ProcessGroup = getattr(of.groups, hop.group)
        self._pooled, self._is_last = of.groups.pooled, hop.group != "intra"
        self.device = of.runtime.store.device
        self.codecs = None if hop.wire is None else codecs_of(hop.wire)

    @abstractmethod
    def join(self, parts: list[Any], context: DistContext) -> torch.Tensor:
        """All that this rank sends, from what its lookups or the hop before have given."""

    @abstractmethod
    def send(self, joined: torch.Tensor, context: DistContext) -> Awaitable[torch.Tensor]:
        """Send what ``join`` has returned."""

    def forward(self, *arguments: Any) -> Awaitable[torch.Tensor]:
        """``arguments``: for each part, ``[B', D]``, or a tuple with ``[n, D]`` for each key if not pooled; then the
        ``DistContext``.
        """
        *parts, context = arguments
        joined = self.join(parts, context)
        if torch.is_grad_enabled() and not joined.requires_grad:
            joined.requires_grad_()  # nothing is trained here, but every rank joins the backward's collective
        sent = self.send(joined, context)
        request = getattr(sent, "_tensor_awaitable", None)
        started = getattr(request, "dummy_tensor", None)  # TorchRec's, whose backward waits for gradients
        if started is not None and started.grad_fn is not None:
            started.grad_fn.register_prehook(partial(_wait, weakref.ref(request), self.exchange(context)))
        return sent

    def exchange(self, context: DistContext) -> Exchange:
        """What each exchange of the gradients of a call is within: it is noted, and what it raises is ``rank_lost``."""
        return partial(self._exchange, *context.backwards)

    def _exchange(self, backwards: Backwards, call: int) -> AbstractContextManager[None]:
        if self._is_last:  # ranks without columns do not take part in others
            backwards.run(call)
        return LostRanks(self._pooled, backwards.collection, in_backward=True)


def _wait(request: Callable[[], Any], exchange: Exchange, *_: Any) -> None:
    """Wait for gradients, right before the backward of TorchRec does, whose graph keeps its request."""
    with exchange():
        request().req.wait()


class PooledStart(OutputDistStart):
    """Pooled columns; columns of the hop that no input has are zeros."""

    def __init__(self, of: Lowered) -> None:
        super().__init__(of)
        self._join = ColumnOrder(of.parts, list(self.hop.columns))

    def sizes(self, context: DistContext) -> list[int]:
        return context.batch_size_per_rank

    def join(self, parts: list[torch.Tensor], context: DistContext) -> torch.Tensor:
        """``[B', D']``."""
        return self._join(parts, sum(self.sizes(context)), self.device)


class AllToAll(PooledStart):
    """Every rank sends its columns, and receives the columns of all ranks for its own samples."""

    operation = "all_to_all"

    def __init__(self, of: Lowered) -> None:
        super().__init__(of)
        self._dist = _all_to_all(self.group, self.hop.dims, self.codecs)

    def send(self, joined: torch.Tensor, context: DistContext) -> Awaitable[torch.Tensor]:
        """Returns ``[B, sum of the columns of all ranks]``."""
        return self._dist(joined, self.sizes(context))


class ReduceScatter(PooledStart):
    """Every rank sends a part of the same columns, and receives their sums for its own samples. If the group is one
    host's, its rank ``i`` takes the samples of rank ``i`` of every host, in the order of hosts. If batches differ in
    size, it runs an all-to-all, and a sum in the order of ranks. That takes the same number of bytes, but more copies
    (in torchrec 1.8.0, gloo has no backward for a reduce-scatter of uneven sizes).
    """

    operation = "reduce_scatter"

    def __init__(self, of: Lowered) -> None:
        super().__init__(of)
        hop = self.hop
        self._hosts, self._sends_columns = len(hop.dims), bool(hop.columns)  # one sender: all ranks, or a host
        self._dist = PooledEmbeddingsReduceScatter(self.group, codecs=self.codecs)
        self._uneven = _all_to_all(self.group, [total_dim(hop.columns)] * self.group.size(), self.codecs)

    def send(self, joined: torch.Tensor, context: DistContext) -> Awaitable[torch.Tensor]:
        """Returns ``[B, D']``; in the group of a host, for the samples of this rank's counterparts."""
        ranks, sizes = self.group.size(), self.sizes(context)
        if self._hosts > 1:
            by_rank = joined.split(sizes)
            joined = torch.cat([by_rank[host * ranks + rank] for rank in range(ranks) for host in range(self._hosts)])
            sizes = [sum(sizes[rank::ranks]) for rank in range(ranks)]
        if ranks == 1 or not self._sends_columns:  # no columns: no rank of the group has any
            return NoWait(joined)
        uneven = len(set(sizes)) > 1
        sent: Awaitable[torch.Tensor] = (self._uneven if uneven else self._dist)(joined, sizes)
        if uneven:
            sent.callbacks.append(lambda parts: parts.view(parts.shape[0], ranks, parts.shape[1] // ranks).sum(1))
        return sent


class CrossHost(AllToAll):
    """The second hop of rows that are cut within hosts: the columns of all hosts for this rank's samples."""

    operation = "cross_host"

    def __init__(self, of: Lowered) -> None:
        super().__init__(of)
        self._counterparts = slice(of.groups.intra.rank(), None, of.groups.intra.size())

    def sizes(self, context: DistContext) -> list[int]:
        return context.batch_size_per_rank[self._counterparts]


class OwnBatch(PooledStart):
    """Takes this rank's samples out of all. Nothing is sent, but the backward gathers the gradients of all ranks."""

    operation = "own_batch"

    def send(self, joined: torch.Tensor, context: DistContext) -> Awaitable[torch.Tensor]:
        """Returns ``[B, D']``."""
        sizes = self.sizes(context)
        if len(sizes) == 1:
            return NoWait(joined)
        return NoWait(TakeOwn.apply(joined, self.group, sizes, self.exchange(context)))


class OutputDistWait(NodeModule):
    """Wait for the rows of this rank's samples."""

    def forward(self, started: Awaitable[torch.Tensor]) -> torch.Tensor:
        """Returns ``[B, D']``; if rows are not pooled, ``[n, D]``, key by key in the order of the ids."""
        return started.wait()


def _all_to_all(
    group: dist.ProcessGroup, dim_per_rank: Sequence[int], codecs: QuantizedCommCodecs | None
) -> PooledEmbeddingsAllToAll:
    # This is the device of two buffers that torchrec 1.8.0 passes around and never reads: they need no elements.
    module = PooledEmbeddingsAllToAll(group, list(dim_per_rank), torch.device("cpu"), codecs=codecs)
    module._non_persistent_buffers_set.update(module._buffers)  # otherwise they would be in the state_dict
    module._buffers.update({name: torch.empty(0, dtype=torch.int32) for name in module._buffers})
    return module


class TakeOwn(torch.autograd.Function):
    """Rows of this rank's samples; backward gathers the gradients of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, pooled: torch.Tensor, group: dist.ProcessGroup, sizes: list[int], exchange: Exchange
    ) -> torch.Tensor:
        ctx.group, ctx.sizes, ctx.exchange = group, sizes, exchange
        begin = sum(sizes[: group.rank()])
        return pooled[begin : begin + sizes[group.rank()]].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # All-gather only takes equal sizes.
        padded = gradient.new_zeros(max(ctx.sizes), gradient.shape[1])
        padded[: gradient.shape[0]] = gradient
        gathered = [torch.empty_like(padded) for _ in ctx.sizes]
        with ctx.exchange():
            dist.all_gather(gathered, padded, group=ctx.group)
        everybody = torch.cat([rows[:size] for rows, size in zip(gathered, ctx.sizes, strict=True)])
        return everybody / len(ctx.sizes) if get_gradient_division() else everybody, None, None, None
