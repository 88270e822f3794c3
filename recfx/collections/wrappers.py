"""What the user passes: models inside wrappers of torch and TorchRec, and devices."""

import contextlib

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torchrec.distributed.model_parallel import DistributedModelParallel

from recfx.errors import ConversionError, type_of

_INSIDE: dict[type[nn.Module], str] = {
    nn.parallel.DistributedDataParallel: "module",
    DistributedModelParallel: "_dmp_wrapped_module",
    OptimizedModule: "_orig_mod",
}
"""What wrappers call the model inside."""


def users_path(model: nn.Module, path: str) -> str:
    """The name of a module or a table in ``model``, without what wrappers of it, and of modules in it, add to it."""
    parts: list[str] = []
    holder: nn.Module | None = model
    for part in path.split("."):
        if not (isinstance(holder, (nn.DataParallel, *_INSIDE)) and part in _INSIDE.values()):
            parts.append(part)
        holder = None if holder is None else holder._modules.get(part)
    return ".".join(parts)


def without_wrappers(path: str) -> str:
    """A fully qualified name, as it is without wrappers."""
    return ".".join(part for part in path.split(".") if part not in _INSIDE.values())


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DistributedModelParallel and torch.compile wrappers."""
    for wrapper, name in _INSIDE.items():
        if isinstance(model, wrapper) and (inner := model._modules.get(name)) is not None:
            return unwrap(inner)
    return model


def usable_device(device: torch.device | str | int) -> torch.device:
    """The device, if this host has it."""
    if not isinstance(device, (torch.device, str, int)) or isinstance(device, bool):
        raise ConversionError(
            f"device is {type_of(device)}.",
            reason="invalid_argument",
            what_to_do="pass a torch.device or its name, such as 'cpu'.",
        )
    try:
        usable = torch.device(device)
        torch.empty(0, device=usable)
    except (RuntimeError, AssertionError, ImportError, ValueError) as error:  # torch asserts that the backend was built
        raise ConversionError(
            f"there is no device {str(device)!r} here ({str(error).splitlines()[0].rstrip('.')}).",
            reason="device_unavailable",
            what_to_do="name a device of this host, such as 'cpu'; or install torch_npu, which NPUs need.",
        ) from error
    return usable


def not_on_meta_by_default() -> contextlib.AbstractContextManager[object]:
    """A context in which new tensors are on the CPU by default, if the caller has put them on meta."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else contextlib.nullcontext()
