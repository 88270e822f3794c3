"""Copies between a device and the host, through pinned memory, which the device reads and writes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

HOST = ("cpu", "meta")
"""Types of devices from and to which nothing has to be copied for the host."""


def crosses(tables: torch.device, indexes: torch.device) -> bool:
    """Whether ids and rows have to be copied between the devices of the tables and of their indexes."""
    return tables.type not in HOST and indexes.type == "cpu"


@cache
def pins(device_type: str) -> bool:
    """Whether memory of the host can be pinned for devices of this type, and their streams record events."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device_type:  # memory is pinned for the accelerator of the process
        return False
    return hasattr(torch.get_device_module(device_type), "current_stream")


def copy_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of one device, in the same order, which the host may read.

    All copies are started on the current stream; then the host waits for these copies, and for nothing that other
    streams do.
    """
    device = tensors[0].device
    if not pins(device.type):
        return [tensor.cpu() for tensor in tensors]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach(), non_blocking=True)
    module = torch.get_device_module(device)
    copied = module.Event()
    copied.record(module.current_stream(device))
    copied.synchronize()
    return copies


def copy_bags_to_device(features: KeyedJaggedTensor, device: torch.device) -> KeyedJaggedTensor:
    """A copy on ``device`` of a KJT of the host; see ``copy_to_device``."""
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        features.keys(),
        copy_to_device(features.values(), device),
        None if weights is None else copy_to_device(weights, device),
        lengths=copy_to_device(features.lengths(), device),
        offsets=copy_to_device(features.offsets(), device),
        stride=features.stride(),
    )


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on ``device`` of a tensor of the host, which is started on the current stream but not waited for."""
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.numel() == 0 or not pins(device.type):
        return tensor.to(device)
    # torch keeps pinned memory until the stream has read it, even if nothing refers to it any more.
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)
