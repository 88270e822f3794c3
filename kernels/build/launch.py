"""Where kernels in Triton can be launched, and in how many programs."""

import functools
import importlib.util
import os
import threading
from typing import Any

import torch

from recfx.kernels.build import tiling, tuned

_INTERPRETED_PROGRAMS = 3  # any number gives the same results; several show it
_interpreter = threading.RLock()  # Triton's interpreter keeps the program's number, and more, in global variables


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(device: torch.device) -> str:
    """Why no kernel can be launched on ``device``, as a sentence; ``""`` if kernels can be launched."""
    if device.type not in ("cpu", "cuda", "npu"):
        return f"there are no kernels in Triton for {device.type}."
    if importlib.util.find_spec("triton") is None:
        package = "triton-ascend" if device.type == "npu" else "triton"
        return f"Triton is not installed: pip install {package}."
    if device.type == "cpu" and not is_interpreted():
        return "on the CPU, kernels in Triton only run in its interpreter (TRITON_INTERPRET=1)."
    try:
        import triton
        from triton.backends import backends
    except (ImportError, AttributeError, OSError) as error:
        return f"Triton is installed, but it cannot be imported ({type(error).__name__}: {error})."
    if device.type == "cpu":
        if isinstance(triton.language.zeros, triton.JITFunction):
            return (
                "TRITON_INTERPRET=1 was set after Triton had been imported, which torch does, too: set it before the "
                "process starts."
            )
        return ""
    needed = {"cuda": "nvidia", "npu": "ascend"}[device.type]
    if needed in backends:
        return ""
    advice = " For NPUs it is triton-ascend, which replaces triton." if needed == "ascend" else ""
    return f"the installed Triton cannot compile for {device.type}, only for {', '.join(sorted(backends))}.{advice}"


def refusal(device: torch.device) -> tuple[str, str] | None:
    """Why kernels for tables cannot be launched on ``device``, as a reason code and a sentence; None if they can."""
    if reason := why_not(device):
        return "no_triton", reason
    try:
        chip_of(device)
    except ValueError as error:
        return "no_tiling_table", f"{error}."
    return None


@functools.cache
def is_possible(device: torch.device) -> bool:
    """Whether ``refusal`` has no reason, found out once per device."""
    return refusal(device) is None


def chip_of(device: torch.device) -> tiling.Chip | None:
    """The limits of an NPU; None for other devices, whose compilers and drivers have none that matter here.

    Raises:
        ValueError: there is no tiling table for the chip.
    """
    name = chip_name(device)
    return None if name is None else tiling.chip_named(name)


def chip_name(device: torch.device) -> str | None:
    """What the driver calls an NPU; None for other devices."""
    if device.type != "npu":
        return None
    return str(torch.get_device_module(device).get_device_name(device))


def programs(device: torch.device, work: int, kernel: str = "") -> int:
    """How many programs of the kernel of this name share ``work`` equal pieces; at least one."""
    chip = chip_of(device)
    if chip is not None:
        return tiling.programs(chip, work, _tuned(device, tuned.PROGRAMS_PER_CORE, kernel) or 1)
    most = _INTERPRETED_PROGRAMS
    if device.type == "cuda":
        per_core = _tuned(device, tuned.PROGRAMS_PER_CORE, kernel) or on_gpu(kernel).programs
        most = torch.cuda.get_device_properties(device).multi_processor_count * per_core
    return max(1, min(work, most))


def takes_gpu_forms(device: torch.device) -> bool:
    """Whether kernels that have a form for GPUs run in it on the device."""
    return device.type == "cuda"


def on_gpu(kernel: str) -> tiling.OnGPU:
    """How the kernel of this name is launched on a GPU."""
    return tiling.ON_GPU.get(kernel, tiling.OnGPU())


def warps(device: torch.device, kernel: str, block: int) -> int:
    """How many warps a program of the kernel of this name has on a GPU, for a block of so many columns."""
    return _tuned(device, tuned.WARPS, kernel) or on_gpu(kernel).warps(block)


def lookup_rows(device: torch.device, block: int, kernel: str) -> int:
    """``tiling.lookup_rows`` for a device, with what was measured there."""
    return tiling.lookup_rows(block, chip_of(device), _tuned(device, tuned.ROWS_IN_FLIGHT, kernel))


def _tuned(device: torch.device, setting: str, kernel: str) -> int | None:
    """What was measured to be best; None where nothing was."""
    if not kernel or device.type == "cpu":
        return None
    name = chip_name(device) or torch.cuda.get_device_properties(device).name
    return tuned.number(name, setting, kernel)


@functools.lru_cache(maxsize=4096)
def numbers_on(device: torch.device, numbers: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """What kernels read of each table, feature or key; it is shared, so nobody may write to it."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def elements_between(first: torch.Tensor, address: int) -> int:
    """How many elements after ``first`` this address is (before it, if negative).

    Raises:
        ValueError: it is not a whole number of elements.
    """
    elements, rest = divmod(address - first.data_ptr(), first.element_size())
    if rest:
        raise ValueError("kernels that address tables by elements cannot take one between two multiples of their size")
    return elements


def launch(kernel: Any, number: int, tensor: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch ``kernel`` in ``number`` programs on the device of ``tensor``, its first argument. Threads may call it."""
    device = tensor.device
    if device.type == "cuda":
        constants["num_warps"] = warps(device, kernel.__name__, constants.get("BLOCK_D", 0))
    on_device = _interpreter if device.type == "cpu" else torch.get_device_module(device).device(device)
    with on_device:
        kernel[(number,)](tensor, *arguments, **constants)
