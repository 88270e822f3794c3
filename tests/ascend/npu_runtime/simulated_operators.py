"""Real numbers on a simulated NPU: torch_npu's operators, computed by the CPU's kernels in the device's own memory.

The device's memory is the host's (``stand_in.c``), so that a CPU tensor over the same bytes is all that a CPU kernel
needs. Autograd, streams, copies and views stay as torch_npu has them. Tensors on two
devices in one operator are refused, as on a real device; its limits of dtypes and sizes are not known here.
"""

import ctypes
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

KEY = "PrivateUse1"
STAND_INS = "RECFX_SIMULATED_FALLBACKS"
"""Environment: operators without a kernel for NPUs, separated by spaces, which torch_npu's fallback shall not see."""

# These make, view or describe memory; torch_npu's own kernels work on the stand-in.
_KEPT = re.compile(
    r"empty|as_strided|view|npu_|_?reshape|resize|set$|unfold$|is_pinned|_pin_memory|pin_memory|record_stream|is_set_to|detach"
    r"|alias|t$|transpose$|expand$|squeeze$|unsqueeze$|select$|slice$|permute$|lift|argsort|_has_|resolve_"
)
# These may get tensors of two devices, as on a real device: copies, and indexes that are on the host.
_TWO_DEVICES = re.compile(r"_?copy|_to_copy|_?index$|_?index_put|_local_scalar_dense|set$")

calls: Counter[str] = Counter()
"""How often each operator ran on the device, by name."""

_library: list[torch.library.Library] = []


def install() -> None:
    """Replace the kernels of this process, once."""
    if _library:
        return
    _library.append(torch.library.Library("aten", "IMPL"))
    names = [name for name in torch._C._dispatch_get_registrations_for_dispatch_key(KEY) if name.startswith("aten::")]
    for name in dict.fromkeys([*names, *os.environ.get(STAND_INS, "").split()]):
        operator = _operator(name)
        if operator is not None and not _KEPT.match(_stem(name)):
            _implement(name, operator)

    for name, function in _OWN.items():
        _implement(name, function)


def _bce_with_logits_backward(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    pos_weight: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        loss = torch.binary_cross_entropy_with_logits(logits, target, weight, pos_weight, reduction)
        (of_logits,) = torch.autograd.grad(loss, logits, gradient)
    return of_logits


# torch_npu has an autograd of its own for some operators, with backwards that no CPU kernel is behind.
_OWN = {"npu::npu_binary_cross_entropy_with_logits_backward": _bce_with_logits_backward}


def _implement(name: str, operator: Any) -> None:
    namespace = name.split("::")[0]
    library = _library[0]
    if namespace != "aten":
        library = torch.library.Library(namespace, "IMPL")
        _library.append(library)
    library.impl(name.split("::")[1], _kernel(name, operator), KEY, allow_override=True)


def _operator(name: str) -> Any:
    """``torch.ops``' callable for ``namespace::name.overload``; None for what Python cannot call."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def _stem(name: str) -> str:
    """``add`` for ``aten::add_.Tensor``."""
    base = name.split("::")[1].split(".")[0]
    return base if base.endswith("__") else base.removesuffix("_")


def over_the_same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a tensor on the simulated device."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(0, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(bytes_, tensor.storage_offset(), tensor.shape, tensor.stride())


def _kernel(name: str, operator: Any) -> Callable[..., Any]:
    two_devices = _TWO_DEVICES.match(_stem(name)) is not None

    def on_the_host(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = _device_of(name, tensors, kwargs.get("device"), two_devices)
        lent: dict[int, _Lent] = {}

        def lend(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "npu":
                given = _Lent(leaf)
                lent[id(given.on_host)] = given
                return given.on_host
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "npu" else leaf

        def take_back(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in lent:
                return lent[id(leaf)].returned()
            if device is None or any(leaf is tensor for tensor in tensors):  # it was written to on the host
                return leaf
            return _moved(leaf, device)

        below = nullcontext() if name in _OWN else torch._C._AutoDispatchBelowAutograd()
        with below:
            result = operator(*tree_map(lend, args), **tree_map(lend, kwargs))
            return tree_map(take_back, result)

    return on_the_host


class _Lent:
    """A tensor of the device that a CPU kernel works on, perhaps as an ``out=`` that it resizes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.on_host = tensor, over_the_same_memory(tensor)
        self._was = (self.on_host.shape, self.on_host.untyped_storage().data_ptr())

    def returned(self) -> torch.Tensor:
        if (self.on_host.shape, self.on_host.untyped_storage().data_ptr()) != self._was:
            self.tensor.resize_(self.on_host.shape)
            over_the_same_memory(self.tensor).copy_(self.on_host)
        return self.tensor


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        over_the_same_memory(result).copy_(tensor)
    return result


def _device_of(
    name: str, tensors: list[torch.Tensor], asked: torch.device | None, two_devices: bool
) -> torch.device | None:
    """Where results go: None for the host.

    Raises:
        RuntimeError: as on a real device, the tensors are on several.
    """
    if asked is not None:
        return None if asked.type == "cpu" else asked
    on = dict.fromkeys(_devices(tensors))
    npus = [device for device in on if device.type == "npu"]
    if len(on) > 1 and not two_devices:
        listed = ", ".join(sorted(map(str, on)))
        raise RuntimeError(f"{name}: all tensors must be on one device, but they are on {listed}")
    return npus[0] if npus else torch.device("npu", torch.npu.current_device())


def _devices(tensors: list[torch.Tensor]) -> Iterator[torch.device]:
    """Of all tensors but numbers on the host, which every operator takes."""
    return (tensor.device for tensor in tensors if tensor.dim() > 0 or tensor.device.type != "cpu")
