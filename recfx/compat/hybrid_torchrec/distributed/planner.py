"""``Topology`` and ``EmbeddingShardingPlanner`` that know NPUs; TorchRec's refuse them unless they are patched."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.planner import EmbeddingShardingPlanner as TorchRecPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from recfx.errors import ConversionError
from recfx.planner.plan import plan
from recfx.planner.topology import NpuTopology, npu_topology


def Topology(world_size: int, compute_device: str, **settings: Any) -> TorchRecTopology | NpuTopology:
    """TorchRec's topology, or an NPU pod with the figures of :func:`recfx.planner.topology.npu_topology`.

    ``settings`` are TorchRec's other arguments; not allowed for ``"npu"`` (``npu_argument``), whose documented defaults
    are those of a GPU.
    """
    if compute_device != "npu":
        return TorchRecTopology(world_size=world_size, compute_device=compute_device, **settings)
    if settings:
        raise _must_stay(sorted(settings), "describe a different pod with recfx.planner.topology.npu_topology.")
    return npu_topology(world_size)


class EmbeddingShardingPlanner:
    """TorchRec's planner, for NPU pods too, for which its other arguments are not allowed (``npu_argument``)."""

    def __init__(
        self,
        topology: TorchRecTopology | NpuTopology | None = None,
        batch_size: int | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        **settings: Any,
    ) -> None:
        self._pod: NpuTopology | None = topology if isinstance(topology, NpuTopology) else None
        self._batch_size, self._constraints = batch_size or BATCH_SIZE, constraints
        if self._pod is None:
            self._torchrec: Any = TorchRecPlanner(topology, batch_size, constraints=constraints, **settings)
        elif settings:
            raise _must_stay(sorted(settings), "plan with recfx.plan, or as TorchRec does it for its own devices.")

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """A plan made by this process alone."""
        if self._pod is None:
            return self._torchrec.plan(module, sharders)
        # Rec SDK Torch's scripts ask for row_wise, whatever the size of the table.
        return plan(module, self._pod, self._constraints, batch_size=self._batch_size, empty_ranks=True)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Rank 0's plan, the same on every rank."""
        if self._pod is None:
            return self._torchrec.collective_plan(module, sharders, pg)
        group = pg or dist.GroupMember.WORLD
        return invoke_on_rank_and_broadcast_result(group, 0, self.plan, module, sharders or [])


def _must_stay(names: list[str], what_to_do: str) -> ConversionError:
    return ConversionError(
        f"{', '.join(names)}: on NPUs these keep their defaults.", reason="npu_argument", what_to_do=what_to_do
    )
