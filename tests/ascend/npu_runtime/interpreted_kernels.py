"""The kernels in Triton on a simulated NPU: Triton's interpreter runs them in the device's memory, which is the host's.

So that operators, their launchers and the tests for a real device run as they are, kernels included. The process needs
``TRITON_INTERPRET=1`` when it starts.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from recfx.kernels.build import launch
from tests.ascend.npu_runtime.environment import is_simulated
from tests.ascend.npu_runtime.simulated_operators import over_the_same_memory

PROGRAMS = 3  # of a launch; one for each core of the chip takes the interpreter long


@pytest.fixture
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton can compile for the simulated device, as it were, and launches there are interpreted."""
    if is_simulated():
        why_not, launch_kernel = launch.why_not, launch.launch
        monkeypatch.setattr(launch, "why_not", lambda device: "" if device.type == "npu" else why_not(device))

        def interpret(kernel: Any, number: int, tensor: torch.Tensor, *arguments: Any, **constants: Any) -> None:
            if tensor.device.type == "npu":
                tensor, *arguments = tree_map_only(torch.Tensor, _on_host, (tensor, *arguments))
            launch_kernel(kernel, number, tensor, *arguments, **constants)

        monkeypatch.setattr(launch, "launch", interpret)
        monkeypatch.setattr(launch, "programs", lambda device, work, kernel="": max(1, min(work, PROGRAMS)))
        launch.is_possible.cache_clear()
    yield
    launch.is_possible.cache_clear()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.device.type == "npu", "a kernel gets tensors of its device alone"
    return over_the_same_memory(tensor)
