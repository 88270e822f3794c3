"""A group of processes called ``hccl`` whose collectives are gloo's, over the memory of simulated NPUs."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from tests.ascend.npu_runtime.simulated_operators import over_the_same_memory

# What torch.distributed calls, on groups of its own and on ones that are written in Python. gloo's backend has some of
# them under older names.
_COLLECTIVES = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "allgather": "allgather",
    "allgather_into_tensor_coalesced": "allgather_into_tensor_coalesced",
    "allreduce": "allreduce",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}


class SimulatedHccl(dist.ProcessGroup):
    """Takes tensors of NPUs, as HCCL does; one on the host is refused, unless the group was also given ``cpu:gloo``."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        # A group's name and timeout are those of its backends.
        self._register_backend(torch.device("npu"), dist.ProcessGroup.BackendType.CUSTOM, self._gloo)

    def getBackendName(self) -> str:
        return "hccl"

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._gloo.barrier() if opts is None else self._gloo.barrier(opts)

    def _lend(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.device.type == "npu":
            return over_the_same_memory(leaf)
        if "cpu:gloo" not in dist.get_backend_config(self):
            raise RuntimeError(f"hccl: a tensor is on {leaf.device}, but this group is one of NPUs")
        return leaf


class _Work(dist._Work):
    """gloo's, which keeps the tensors until it is done."""

    def __init__(self, work: dist.Work, kept: list[Any]) -> None:
        super().__init__()
        self._work, self._kept = work, kept

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._work.wait() if timeout == timedelta(0) else self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future()


def _collective(name: str) -> Callable[..., dist.Work]:
    def run(self: SimulatedHccl, *arguments: Any) -> dist.Work:
        lent = tree_map(self._lend, list(arguments))
        return _Work(getattr(self._gloo, name)(*lent), tree_leaves((arguments, lent)))

    return run


for _name, _of_gloo in _COLLECTIVES.items():
    setattr(SimulatedHccl, _name, _collective(_of_gloo))


def install() -> None:
    """Let ``init_process_group("hccl")`` make such groups."""
    dist.Backend.register_backend("hccl", SimulatedHccl, devices=["npu"])
