"""Converts plain data to JSON and back: what a checkpoint stores besides tensors, read without a pickle.

Numbers, strings, None and lists are JSON's own. Everything else is an object with one key, which says what it is.
"""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from recfx.checkpoint.contents import DTYPES, NAMES
from recfx.errors import short


def encode(value: object) -> bytes:
    """The JSON of ``value``.

    Raises:
        TypeError: it, or something in it, is not a None, bool, int, float, complex, str, bytes, list, tuple, set,
            dict, ``OrderedDict``, tensor, ``torch.Size``, ``torch.dtype`` or ``torch.device``. A ``numpy.float64``,
            ``int64`` or ``bool_`` is written as the equal Python number.
        RecursionError: it contains itself, or is nested some hundred levels deep.
    """
    return json.dumps(_encoded(value)).encode()


def decode(content: bytes) -> Any:
    """The value that was given to ``encode``; tensors are on the CPU.

    Raises:
        ValueError: ``content`` is not what ``encode`` writes.
    """
    try:
        return _decoded(json.loads(content))
    except (KeyError, TypeError, OverflowError, RecursionError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _encoded(value: Any) -> Any:
    if isinstance(value, (numpy.float64, numpy.int64, numpy.bool_)):  # these compute bit for bit as Python's do
        value = value.item()
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encoded(item) for item in value]
    for name, (known_type, to_json, _) in _KINDS.items():
        if kind is known_type:
            return {name: to_json(value)}
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    return _KINDS[name][2](content)


def _items(value: Any) -> list[Any]:
    return [_encoded(item) for item in value]


def _pairs(value: dict[Any, Any]) -> list[Any]:
    pairs = []
    for key, item in value.items():
        try:
            pairs.append([_encoded(key), _encoded(item)])
        except TypeError as error:
            raise TypeError(f"{error} in {short(key)}") from None
    return pairs


def _pairs_back(content: list[Any]) -> list[tuple[Any, Any]]:
    return [(_decoded(key), _decoded(item)) for key, item in content]


def _list_back(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("not a list")
    return [_decoded(item) for item in content]


def _tensor(value: Tensor) -> dict[str, Any]:
    if value.dtype not in NAMES or value.layout != torch.strided:
        raise TypeError(f"a tensor of dtype {value.dtype} and layout {value.layout}")
    flat = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value.detach()).view(-1)
    content = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
    return {"dtype": NAMES[value.dtype], "size": list(value.shape), "content": content}


def _tensor_back(content: dict[str, Any]) -> Tensor:
    dtype, data = DTYPES[content["dtype"]], _bytes_back(content["content"])
    size = content["size"]
    if any(type(length) is not int or length < 0 for length in size):
        raise TypeError("an invalid size")
    if len(data) != math.prod(size) * dtype.itemsize:
        raise TypeError("a tensor of a different size")
    if not data:
        return torch.empty(size, dtype=dtype, device="cpu")
    elements = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype == torch.bool:
        elements.clamp_(max=1)  # operators may do anything with a bool whose byte is not 0 or 1
    return elements.view(dtype).view(size)


def _bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes_back(content: str) -> bytes:
    return base64.b64decode(content, validate=True)


def _device_back(content: str) -> torch.device:
    if not isinstance(content, str):
        raise TypeError("an invalid device")
    return torch.device(content)


# What an object with one key may be: by that key, the type, how it is written, and how it is read.
_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, _items, lambda content: tuple(_list_back(content))),
    "set": (set, _items, lambda content: set(_list_back(content))),
    "dict": (dict, _pairs, lambda content: dict(_pairs_back(content))),
    "OrderedDict": (OrderedDict, _pairs, lambda content: OrderedDict(_pairs_back(content))),
    "bytes": (bytes, _bytes, _bytes_back),
    "complex": (complex, lambda value: [value.real, value.imag], lambda content: complex(*content)),
    "tensor": (Tensor, _tensor, _tensor_back),
    "size": (torch.Size, list, torch.Size),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), DTYPES.__getitem__),
    "device": (torch.device, str, _device_back),
}
