"""``to_host`` and ``to_device``: copies between a device, where tables are, and the host, where ids are hashed.

They go through pinned memory, which the device reads and writes by itself.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.runtime.bags import keep_ids_at, with_values
from recfx.runtime.base import NodeModule
from recfx.runtime.lowered import Lowered


def record_stream(value: Any, stream: Any) -> None:
    """Keep the memory of ``value`` for ``stream``. What is on the host needs no keeping, and torch refuses it there.
    ``value`` is a tensor, a jagged or keyed tensor, a list of them, or anything else with ``record_stream``.
    """
    if isinstance(value, KJTList):
        for kjt in value:
            record_stream(kjt, stream)
        return
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            value.record_stream(stream)
    elif isinstance(value, (KeyedJaggedTensor, JaggedTensor)):
        # Each by itself: ids may be on the host while their bags are on the device.
        parts = (value.values(), value.weights_or_none(), value.lengths_or_none(), value.offsets_or_none())
        for part in parts:
            if part is not None:
                record_stream(part, stream)
    elif not isinstance(value, KeyedTensor) or value.device().type != "cpu":
        value.record_stream(stream)


HOST = ("cpu", "meta")
"""Types of devices from and to which nothing has to be copied for the host."""


def crosses(tables: torch.device, indexes: torch.device) -> bool:
    """Whether ids and rows have to be copied between the devices of the tables and of their indexes."""
    return tables.type not in HOST and indexes.type == "cpu"


@cache
def pins(device_type: str) -> bool:
    """Whether memory of the host can be pinned for devices of this type, and their streams record events."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device_type:  # memory is pinned for the accelerator of the process
        return False
    return hasattr(torch.get_device_module(device_type), "current_stream")


class CopyToHost:
    """Copies of tensors of one device, which are started on the current stream. The host may go on meanwhile."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device
        self._copied: Any = None
        if not pins(device.type):
            self._copies = [tensor.cpu() for tensor in tensors]
            return
        self._copies = [torch.empty(one.shape, dtype=one.dtype, device="cpu", pin_memory=True) for one in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
        module = torch.get_device_module(device)
        self._copied = module.Event()
        self._copied.record(module.current_stream(device))

    def wait(self) -> list[torch.Tensor]:
        """The copies, once they are there; this waits for nothing that other streams do."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return self._copies


def copy_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of one device, which the host may read: it waits for them."""
    return CopyToHost(tensors).wait()


def copy_bags_to_device(features: KeyedJaggedTensor, device: torch.device) -> KeyedJaggedTensor:
    """A copy on ``device`` of a KJT of the host; see ``copy_to_device``."""
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        features.keys(), copy_to_device(features.values(), device),
        None if weights is None else copy_to_device(weights, device),
        lengths=copy_to_device(features.lengths(), device), offsets=copy_to_device(features.offsets(), device),
        stride=features.stride(),
    )  # fmt: skip


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on ``device`` of a tensor of the host, which is started on the current stream but not waited for."""
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.numel() == 0 or not pins(device.type):
        return tensor.to(device)
    # torch keeps pinned memory until the stream has read it, even if nothing refers to it any more.
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


class ToHost(NodeModule):
    """Copy ids into pinned memory, and wait until they are there. ``with_bags``: the lengths of the bags and the
    weights of the ids are copied as well, because ranks exchange them on the host.
    """

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        self.with_bags = bool(of.node.kwargs.get("with_bags"))

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features``: ids, with one batch size. Returns int64 ids in the same bags; a batch that is on the host (or
        on meta) is returned as it is.
        """
        if features.values().device.type in HOST:
            return features
        return _all_of(features) if self.with_bags else _ids_of(features)


def _ids_of(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    copied, stride = [features.values().long()], features.stride()
    length_per_key = features.length_per_key_or_none()
    if length_per_key is None and features.variable_stride_per_key():
        length_per_key = features.length_per_key()
    elif length_per_key is None and stride == 0:
        length_per_key = [0] * len(features.keys())
    elif length_per_key is None:
        copied.append(features.offsets()[::stride])
    ids, *borders = copy_to_host(copied)
    if borders:
        length_per_key = borders[0].diff().tolist()
    return KeyedJaggedTensor(
        features.keys(), ids, features.weights_or_none(), lengths=features.lengths(), offsets=features.offsets(),
        stride=stride, length_per_key=length_per_key,
    )  # fmt: skip


def _all_of(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights, tensors = features.weights_or_none(), [features.values(), features.lengths()]
    is_trained = weights is not None and weights.requires_grad
    if weights is not None and not is_trained:
        tensors.append(weights)
    ids, lengths, *copied = copy_to_host(tensors)
    if weights is not None:
        weights = weights.to(torch.device("cpu")) if is_trained else copied[0]  # the copy gets its gradient
    return KeyedJaggedTensor(features.keys(), ids, weights, lengths=lengths, stride=features.stride())


class ToDevice(NodeModule):
    """Copy rows from pinned memory, without waiting for the device."""

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        self.store = of.runtime.store

    def forward(self, rows: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``rows``: rows on the host; their bags and weights may be on the host or on the device. Returns all of them
        on the device of the tables. Rows that are -1, in bags on the device, are taken out of them.
        """
        device, values = self.store.device, rows.values()
        if values.device.type != "cpu" or device.type in HOST:
            return rows
        weights = rows.weights_or_none()
        if rows.offsets().device.type == "cpu":
            return copy_bags_to_device(rows, device)
        kept = values != -1
        if bool(kept.all()):
            return with_values(rows, copy_to_device(values, device), weights)
        before = torch.zeros(values.numel() + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(kept, 0, out=before[1:])
        positions = torch.nonzero(kept).squeeze(1)
        return keep_ids_at(
            rows,
            copy_to_device(values[positions], device),
            copy_to_device(before, device),
            None if weights is None else weights.index_select(0, copy_to_device(positions, device)),
        )
