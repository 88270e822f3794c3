"""Everything that a checkpoint stores besides tensors: extra states of modules, and settings of optimizers.

It is stored as a tensor of bytes that contain JSON. Its author may be malicious, so its shape is checked before its
content is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recfx.checkpoint import plain_data, storage
from recfx.checkpoint.contents import SETTINGS
from recfx.checkpoint.manifest import torn
from recfx.checkpoint.saved_folder import SavedFolder
from recfx.errors import CheckpointError, type_of

_MOST_BYTES = 1 << 30


def pack_settings(settings: dict[str, Any]) -> Tensor:
    """The settings as a uint8 tensor.

    Raises:
        CheckpointError: ``value_not_supported``.
    """
    try:
        content = plain_data.encode(settings)
    except (TypeError, RecursionError) as error:
        problem = "a value that contains itself" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"a setting of an optimizer, or an extra state of a module, is not plain data ({problem}).",
            reason="value_not_supported",
            what_to_do="use numbers, strings and tensors, and lists and dicts of them.",
        ) from error
    if len(content) > _MOST_BYTES:
        raise CheckpointError(
            f"settings of optimizers and extra states of modules take {len(content)} bytes together.",
            reason="value_not_supported",
            what_to_do="keep large tensors in buffers, or directly in an optimizer's state, not in lists or dicts.",
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def read_settings(folder: SavedFolder, described: Mapping[str, Tensor]) -> dict[str, Any]:
    """The settings that were given to ``pack_settings``.

    Raises:
        CheckpointError: ``checkpoint_torn``.
    """
    entry = described.get(SETTINGS)
    if entry is None or entry.dtype != torch.uint8 or entry.dim() != 1 or entry.numel() > _MOST_BYTES:
        raise torn(folder.path, "it has no settings")
    content = storage.read(folder, {SETTINGS: entry})[SETTINGS].numpy().tobytes()
    try:
        settings = plain_data.decode(content)
        _check(settings, {"extra_state": dict, "in_backward": dict, "optimizer": (dict, type(None))}, "settings")
        _check_names(settings["extra_state"], "extra_state")
        _check_names(settings["in_backward"], "in_backward")
        for name, optimizer in settings["in_backward"].items():
            _check_in_backward(optimizer, f"in_backward of {name!a}")
        if settings["optimizer"] is not None:
            _check_optimizer(settings["optimizer"])
        _check_warm_ups(settings.setdefault("warm_ups", {}))  # files of earlier versions have none
    except ValueError as error:
        raise torn(folder.path, f"its settings are invalid: {error}") from None
    return dict(settings)


def _check(value: object, entries: Mapping[str, type | tuple[type, ...]], place: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {type_of(value)}")
    for key, kind in entries.items():
        if key not in value or not isinstance(value[key], kind):
            raise ValueError(f"{place} has no {key!r}, or one of the wrong type")


def _check_names(value: dict[Any, Any], place: str) -> None:
    if not all(isinstance(name, str) for name in value):
        raise ValueError(f"{place} has keys that are not names")


def _are_names(values: list[Any]) -> bool:
    return all(isinstance(name, str) for name in values) and len(set(values)) == len(values)


def _check_state(state: Any, place: str) -> None:
    """Check what is saved besides tensors about the state of one parameter."""
    _check(state, {"values": dict, "tensors": list}, place)
    _check_names(state["values"], place)
    if not _are_names(state["tensors"]) or set(state["tensors"]) & set(state["values"]):
        raise ValueError(f"{place} has wrong names")


def _check_in_backward(optimizer: Any, place: str) -> None:
    _check(optimizer, {"kind": str, "settings": dict}, place)
    _check_state(optimizer, place)
    _check_names(optimizer["settings"], place)
    if "params" in optimizer["settings"]:
        raise ValueError(f"{place} has wrong names")
    if "blocks" not in optimizer:
        return
    blocks, end = optimizer["blocks"], 0
    for block in blocks if isinstance(blocks, list) else [None]:
        if not isinstance(block, tuple) or [type(column) for column in block] != [int, int]:
            raise ValueError(f"{place} has wrong blocks")
        if block[0] != end or block[1] <= end:
            raise ValueError(f"{place} has blocks that do not follow each other")
        end = block[1]
    if not blocks:
        raise ValueError(f"{place} has no blocks")


def _check_optimizer(optimizer: Any) -> None:
    _check(optimizer, {"kind": str, "groups": list, "state": dict}, "optimizer")
    if not isinstance(optimizer.get("any_order", False), bool):
        raise ValueError("optimizer has a wrong 'any_order'")
    for group in optimizer["groups"]:
        _check(group, {"params": list}, "a group of optimizer")
        _check_names(group, "a group of optimizer")
        if not _are_names(group["params"]):
            raise ValueError("a group of optimizer has wrong params")
    _check_names(optimizer["state"], "optimizer")
    for name, state in optimizer["state"].items():
        _check_state(state, f"the state of {name!a}")


def _check_warm_ups(warm_ups: Any) -> None:
    if not isinstance(warm_ups, dict):
        raise ValueError("the warm-ups are no dict")
    _check_names(warm_ups, "warm-ups")
    for state in warm_ups.values():
        numbers = isinstance(state, list) and [type(number) for number in state] == [int, int]
        if not numbers or not all(0 <= number < 1 << 63 for number in state):
            raise ValueError("a warm-up has a wrong state")
