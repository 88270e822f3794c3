"""Finds an object within a batch: how a pipeline knows in advance what a collection will be called with."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

ATTRIBUTE, ITEM = "attribute", "item"
Path = tuple[tuple[str, Any], ...]
"""Steps from the batch to the object: (``"attribute"``, name) or (``"item"``, key)."""

_JAGGED = (KeyedJaggedTensor, JaggedTensor, KeyedTensor)
_ENTIRE = (torch.Tensor, *_JAGGED, nn.Module, str, bytes, int, float, type(None))
_DEEPEST = 4


def path_in(batch: Any, part_of_batch: Any) -> Path | None:
    """The shortest path from ``batch`` to the very object ``part_of_batch``; None if it is not a part of the batch.

    Looks into tuples, lists, dicts, and attributes of objects; not into tensors.
    """
    waiting: deque[tuple[Any, Path]] = deque([(batch, ())])
    seen: set[int] = set()
    while waiting:
        value, path = waiting.popleft()
        if value is part_of_batch:
            return path
        if id(value) in seen or len(path) == _DEEPEST or isinstance(value, _ENTIRE):
            continue
        seen.add(id(value))
        waiting.extend((part, (*path, step)) for step, part in _parts(value))
    return None


def follow(batch: Any, path: Path) -> Any:
    """The object at the same place in another batch; ``AttributeError`` and the like if it has no such part."""
    for kind, name in path:
        batch = getattr(batch, name) if kind == ATTRIBUTE else batch[name]
    return batch


def tensors_in(batch: Any) -> Iterator[Any]:
    """The parts of the batch that have ``record_stream``: tensors, and TorchRec's jagged tensors."""
    waiting, seen = [batch], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if hasattr(value, "record_stream"):
            yield value
        elif not isinstance(value, _ENTIRE):
            waiting.extend(part for _, part in _parts(value))


class Versions:
    """How often torch has changed each tensor of a batch in place, and where the tensors are; other ways to write to
    their memory (``.data``, NumPy) are not noticed.
    """

    def __init__(self, batch: Any) -> None:
        self._before = {id(tensor): (tensor, _version(tensor)) for tensor in _all_tensors(batch)}

    def changed(self, part_of_batch: Any) -> bool:
        """Whether a tensor of this part was changed since."""
        before = [(tensor, self._before.get(id(tensor))) for tensor in _all_tensors(part_of_batch)]
        return any(known is not None and _version(tensor) != known[1] for tensor, known in before)

    def overwritten_by(self, batch: Any) -> bool:
        """Whether a tensor was changed since, and ``batch`` has one in the same memory: views of one tensor have one
        version, which says nothing of a single view. Inference tensors have none: in the same memory, they count as
        changed.
        """
        places = {_version(tensor)[1] for tensor in _all_tensors(batch) if tensor.numel()}
        changed = ((tensor.is_inference() or _version(tensor) != version, version[1])
                   for tensor, version in self._before.values())  # fmt: skip
        return any(is_changed and place in places for is_changed, place in changed)


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return -1 if tensor.is_inference() else tensor._version, tensor.data_ptr() if is_plain else -1


def _all_tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, with those that jagged and keyed tensors consist of."""
    waiting, seen = [batch], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif (isinstance(value, _JAGGED) or not isinstance(value, _ENTIRE)) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(part for _, part in _parts(value))


def move(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``, moved by its own ``to`` or, for a tuple, list, dict or dataclass, part by part."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(part, device) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move(part, device) for part in batch)
    if isinstance(batch, Mapping):
        return {key: move(part, device) for key, part in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        given = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: move(getattr(batch, name), device) for name in given})
    return batch


def _parts(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(value, Mapping):
        yield from (((ITEM, key), part) for key, part in value.items())
    elif isinstance(value, (tuple, list)):
        yield from (((ITEM, position), part) for position, part in enumerate(value))
    else:
        yield from (((ATTRIBUTE, name), part) for name, part in getattr(value, "__dict__", {}).items())
        slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
        names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
        yield from (((ATTRIBUTE, name), getattr(value, name)) for name in names if hasattr(value, name))
