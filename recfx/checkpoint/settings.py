"""Everything that a checkpoint stores besides tensors: extra states of modules, and settings of optimizers.

It is stored as a tensor of bytes, which are those of ``torch.save``, to be read with ``weights_only=True``.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from recfx.checkpoint.contents import SETTINGS
from recfx.checkpoint.manifest import torn
from recfx.checkpoint.storage import SavedFolder
from recfx.errors import CheckpointError


def pack_settings(settings: dict[str, Any]) -> Tensor:
    """The settings as a uint8 tensor; ``value_not_supported`` for what is not plain data."""
    stream = io.BytesIO()
    try:
        torch.save(tree_map(_plain, settings), stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:  # of the user's classes
        refused = re.search(r"GLOBAL (\S+)", str(error))  # in a message of a page
        what = refused[1] if refused else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"a setting of an optimizer, or an extra state of a module, is not plain data ({what}).",
            reason="value_not_supported",
            what_to_do="use numbers, strings and tensors, and lists and dicts of them.",
        ) from error
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    if isinstance(value, (numpy.float64, numpy.int64, numpy.bool_)):  # these compute bit for bit as Python's do
        return value.item()
    return value.detach().to("cpu", copy=True) if type(value) is Tensor else value  # not all that it is a view of


def read_settings(folder: SavedFolder) -> dict[str, Any]:
    """The settings that were given to ``pack_settings``; ``checkpoint_torn`` if they cannot be read."""
    if SETTINGS not in folder.described:
        raise torn(folder.path, "it has no settings")
    content = folder.read([SETTINGS])[SETTINGS].numpy().tobytes()
    try:
        if not content.startswith(b"{"):
            loaded: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
            return loaded
        settings: dict[str, Any] = json.loads(content, object_hook=_version_2)
    except Exception as error:
        raise torn(folder.path, f"its settings cannot be read: {error}") from None
    return {"warm_ups": {}, "prefix_in_backward": "in_backward.", **settings}


_VERSION_2: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple, "set": set, "dict": dict, "OrderedDict": OrderedDict, "bytes": base64.b64decode, "size": torch.Size,
    "complex": lambda parts: complex(*parts), "dtype": lambda name: getattr(torch, name), "device": torch.device,
    "tensor": lambda tensor: tensor,
}  # fmt: skip


def _version_2(entry: dict[str, Any]) -> Any:
    """What an object in the JSON of version 2 stands for: its one key says what it is."""
    if "content" in entry:
        data = bytearray(base64.b64decode(entry["content"]))
        return torch.tensor(data, dtype=torch.uint8).view(getattr(torch, entry["dtype"])).view(entry["size"])
    ((kind, content),) = entry.items()
    return _VERSION_2[kind](content)
