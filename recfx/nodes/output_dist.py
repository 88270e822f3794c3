"""``output_dist_start`` and ``output_dist_wait``: pooled rows travel back to the ranks whose samples they are.

One class per operation: ``AllToAll`` (a rank has whole rows of its columns), ``ReduceScatter`` (every rank holds a part
of every sum), ``CrossHost`` (the second hop of rows that are cut inside hosts) and ``OwnBatch`` (every rank has pooled
everybody's samples). Which of them a table's rows take is up to its sharding type. Backwards are collectives as well,
and average gradients over ranks as TorchRec's do.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll, PooledEmbeddingsReduceScatter
from torchrec.distributed.types import Awaitable, NoWait

from recfx.ir.columns import Columns, total_dim
from recfx.nodes.base import NodeModule
from recfx.nodes.column_order import ColumnOrder
from recfx.nodes.dist_context import DistContext


class OutputDistStart(NodeModule, ABC):
    """Join the pooled columns of this rank and send them off.

    Args:
        group: the ranks that take part.
        columns: what this rank sends, in order.
        parts: the columns of each input, in order; those of ``columns`` that are in none are zeros.
        device: what a rank without inputs sends is made here, as the group's backend may know no other.
    """

    def __init__(
        self, group: dist.ProcessGroup, columns: list[Columns], parts: list[list[Columns]], device: torch.device
    ) -> None:
        super().__init__()
        self.group = group
        self.columns = columns
        self.device = device
        self.take_parts(parts)

    @property
    def operation(self) -> str:
        """What it does, in one word: the name of its class, as ``all_to_all``."""
        return re.sub("(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    def take_parts(self, parts: list[list[Columns]]) -> None:
        """Take inputs that hold their columns otherwise."""
        self.parts, self._join = parts, ColumnOrder(parts, self.columns)

    @abstractmethod
    def send(self, pooled: torch.Tensor, sizes: list[int]) -> Awaitable[torch.Tensor]:
        """``pooled``: ``[sum of sizes, D']``; ``sizes``: batch size of each rank of the group."""

    def sizes(self, context: DistContext) -> list[int]:
        """Batch size of each rank of the group."""
        return context.batch_size_per_rank

    def forward(self, *arguments: Any) -> Awaitable[torch.Tensor]:
        """``arguments``: one ``[B', D]`` a part, then the ``DistContext``."""
        *pooled, context = arguments
        sizes = self.sizes(context)
        joined = self._join(pooled, sum(sizes), self.device)
        if torch.is_grad_enabled() and not joined.requires_grad:
            joined.requires_grad_()  # nothing is trained here, but the backward's collective needs every rank
        return self.send(joined, sizes)


class AllToAll(OutputDistStart):
    """Every rank sends its columns; each gets the columns of all ranks, for its own samples.

    Args:
        group, columns, parts, device: see above.
        dim_per_rank: columns that each rank sends.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        columns: list[Columns],
        parts: list[list[Columns]],
        device: torch.device,
        dim_per_rank: list[int],
    ) -> None:
        super().__init__(group, columns, parts, device)
        self._dim_per_rank = dim_per_rank
        self._dist = _all_to_all(group, dim_per_rank)

    def send(self, pooled: torch.Tensor, sizes: list[int]) -> Awaitable[torch.Tensor]:
        """Returns ``[B, sum of dim_per_rank]``."""
        sent: Awaitable[torch.Tensor] = self._dist(pooled, sizes)
        return sent


class ReduceScatter(OutputDistStart):
    """Every rank sends a part of the same columns; each gets their sums, for its own samples.

    Where batches differ in size it is an all-to-all, and a sum in the order of ranks: as many bytes, but more copies
    (gloo has no backward for the reduce-scatter of uneven sizes in torchrec 1.8.0).

    Args:
        group, columns, parts, device: see above.
        hosts: 1, or the number of hosts where the group is that of one host: its rank ``i`` takes the samples of rank
            ``i`` of every host, in the order of hosts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        columns: list[Columns],
        parts: list[list[Columns]],
        device: torch.device,
        hosts: int = 1,
    ) -> None:
        super().__init__(group, columns, parts, device)
        self.hosts = hosts
        self._dist = PooledEmbeddingsReduceScatter(group)
        self._uneven = _all_to_all(group, [total_dim(columns)] * group.size())

    def send(self, pooled: torch.Tensor, sizes: list[int]) -> Awaitable[torch.Tensor]:
        """Returns ``[B, D']``; with ``hosts``, of the samples of this rank's counterparts."""
        ranks = self.group.size()
        if self.hosts > 1:
            by_rank = pooled.split(sizes)
            pooled = torch.cat([by_rank[host * ranks + rank] for rank in range(ranks) for host in range(self.hosts)])
            sizes = [sum(sizes[rank::ranks]) for rank in range(ranks)]
        if ranks == 1 or not self.columns:  # none: no rank of the group has any
            return NoWait(pooled)
        if len(set(sizes)) > 1:
            return _SumOverRanks(self._uneven(pooled, sizes), ranks)
        sent: Awaitable[torch.Tensor] = self._dist(pooled, sizes)
        return sent


class CrossHost(AllToAll):
    """The second hop of rows cut inside a host: sums of all hosts' columns for this rank's samples.

    Args:
        group: this rank's counterparts on all hosts.
        columns, parts, device, dim_per_rank: as ``AllToAll``, by host.
        local_rank: of this rank on its host.
        local_size: ranks of a host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        columns: list[Columns],
        parts: list[list[Columns]],
        device: torch.device,
        dim_per_rank: list[int],
        local_rank: int,
        local_size: int,
    ) -> None:
        super().__init__(group, columns, parts, device, dim_per_rank)
        self._local_rank, self._local_size = local_rank, local_size
        self._local = slice(local_rank, None, local_size)

    def sizes(self, context: DistContext) -> list[int]:
        """Batch sizes of this rank's counterparts."""
        return context.batch_size_per_rank[self._local]


class OwnBatch(OutputDistStart):
    """This rank's samples out of everybody's. Nothing is sent, but the backward gathers all ranks' gradients."""

    def send(self, pooled: torch.Tensor, sizes: list[int]) -> Awaitable[torch.Tensor]:
        """Returns ``[B, D']``."""
        if len(sizes) == 1:
            return NoWait(pooled)
        own: torch.Tensor = _OwnRows.apply(pooled, self.group, sizes)
        return NoWait(own)


class OutputDistWait(NodeModule):
    """Wait for the pooled rows of this rank's samples."""

    def forward(self, started: Awaitable[torch.Tensor]) -> torch.Tensor:
        """Returns ``[B, D']``."""
        return started.wait()


def _all_to_all(group: dist.ProcessGroup, dim_per_rank: Sequence[int]) -> PooledEmbeddingsAllToAll:
    # The device is that of two buffers which torchrec 1.8.0 passes around and never reads.
    module = PooledEmbeddingsAllToAll(group, list(dim_per_rank), torch.device("cpu"))
    module._non_persistent_buffers_set.update(module._buffers)  # they would get into the state_dict
    return module


class _SumOverRanks(Awaitable[torch.Tensor]):
    """``[B, ranks * D']`` that arrive as ``[B, D']``."""

    def __init__(self, parts: Awaitable[torch.Tensor], ranks: int) -> None:
        super().__init__()
        self._parts, self._ranks = parts, ranks

    def _wait_impl(self) -> torch.Tensor:
        parts = self._parts.wait()
        return parts.view(parts.shape[0], self._ranks, parts.shape[1] // self._ranks).sum(1)


class _OwnRows(torch.autograd.Function):
    """Rows of this rank's samples; backward gathers the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor, group: dist.ProcessGroup, sizes: list[int]) -> torch.Tensor:
        ctx.group, ctx.sizes = group, sizes
        begin = sum(sizes[: group.rank()])
        return pooled[begin : begin + sizes[group.rank()]].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # All-gather takes equal sizes only.
        padded = gradient.new_zeros(max(ctx.sizes), gradient.shape[1])
        padded[: gradient.shape[0]] = gradient
        gathered = [torch.empty_like(padded) for _ in ctx.sizes]
        dist.all_gather(gathered, padded, group=ctx.group)
        everybody = torch.cat([rows[:size] for rows, size in zip(gathered, ctx.sizes, strict=True)])
        return everybody / len(ctx.sizes) if get_gradient_division() else everybody, None, None
