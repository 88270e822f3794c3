"""Everything that a checkpoint stores besides tensors: extra states of modules, and settings of optimizers.

It is stored as a tensor of bytes that contain JSON. Its author may be malicious, so its shape is checked before its
content is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from recfx.checkpoint import plain_data, storage
from recfx.checkpoint.contents import SETTINGS, mismatch
from recfx.checkpoint.manifest import torn
from recfx.checkpoint.optimizer_probe import ELEMENTWISE, state_after_a_step
from recfx.checkpoint.saved_folder import SavedFolder
from recfx.errors import CheckpointError, type_of

NOT_SETTINGS = ("params", "param_names")
"""Entries of an optimizer's groups that say which parameters it updates: a checkpoint has its own names for them."""
_MOST_BYTES = 1 << 30


def pack_settings(settings: dict[str, Any]) -> Tensor:
    """The settings as a uint8 tensor.

    Raises:
        CheckpointError: ``value_not_supported``.
    """
    try:
        content = plain_data.encode(settings)
    except (TypeError, RecursionError) as error:
        what = "a value that contains itself" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"a setting of an optimizer, or an extra state of a module, is not plain data ({what}).",
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
        for name, entry in settings["in_backward"].items():
            _check_in_backward(name, entry)
        if settings["optimizer"] is not None:
            _check_optimizer(settings["optimizer"])
        _check_warm_ups(settings.setdefault("warm_ups", {}))  # files of earlier versions have none
    except ValueError as error:
        raise torn(folder.path, f"its settings are invalid: {error}") from None
    return dict(settings)


def check_settings_fit(saved: Mapping[str, Any], current: Mapping[str, Any], module_path: str) -> None:
    """Check that an optimizer can take the settings: those that it has must be of the same kind.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    for key, value in saved.items():
        if key not in NOT_SETTINGS and key in current and not _alike(value, current[key]):
            raise mismatch(
                f"its setting {key!r} was saved as {_shown(value)}, but is {_shown(current[key])} here.",
                module_path=module_path,
                what_to_do="build the optimizer as it was built when saving.",
            )


def check_state_fits(
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    parameter: Tensor,
    optimizer: type,
    settings: Mapping[str, Any],
    name: str,
) -> None:
    """Check that the next step can continue from the saved state of one parameter, for known torch optimizers.

    Args:
        tensors: the tensors of the state, possibly on meta.
        values: the rest of the state.
        parameter: the parameter that the state belongs to.
        optimizer: class of the optimizer.
        settings: the settings of its group, as they will be.
        name: name of the parameter, for the message.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    if optimizer not in ELEMENTWISE or not (tensors or values):
        return
    what_to_do = "build the optimizer as it was built when saving."
    for key, needed in state_after_a_step(optimizer, settings, parameter, name).items():
        found = tensors.get(key, values.get(key))
        if found is None and (needed is None or optimizer is torch.optim.SGD):
            continue  # SGD starts a momentum that is missing
        if found is None:
            raise mismatch(f"its saved state lacks {key!r}.", module_path=name, what_to_do=what_to_do)
        if isinstance(needed, Tensor) and needed.dim() == parameter.dim() > 0:
            fits = isinstance(found, Tensor) and found.shape == parameter.shape
        else:
            fits = is_number(found) or (isinstance(found, Tensor) and found.shape == parameter.shape == ())
        if not fits:
            raise mismatch(
                f"its state {key!r} was saved as {_shown(found)}, but the parameter is {tuple(parameter.shape)}.",
                module_path=name,
                what_to_do=what_to_do,
            )
    for key, value in {**values, **tensors}.items():  # including those that the next step does not need
        alike = value is None or isinstance(value, bool) or is_number(value)
        if not alike and not (isinstance(value, Tensor) and tuple(value.shape) in ((), tuple(parameter.shape))):
            raise mismatch(
                f"its state {key!a} was saved as {_shown(value)}, but the parameter is {tuple(parameter.shape)}.",
                module_path=name,
                what_to_do=what_to_do,
            )


def _alike(saved: object, current: object) -> bool:
    if isinstance(current, numpy.generic):
        current = current.item()
    if current is None:
        return saved is None or isinstance(saved, (bool, int, float, str, Tensor))
    if saved is None:
        return isinstance(current, bool)  # for example foreach= of torch's optimizers, which may be None
    if isinstance(saved, Tensor) and isinstance(current, Tensor):
        return saved.shape == current.shape
    if is_number(saved) and is_number(current):
        return True
    if isinstance(saved, (tuple, list)) and isinstance(current, (tuple, list)):
        return len(saved) == len(current) and all(map(_alike, saved, current))
    return type(saved) is type(current)


def is_number(value: object) -> bool:
    """Whether it is an int or a float, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.dtype.is_complex and value.dtype != torch.bool
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!a:.50}"


def _check(found: object, entries: Mapping[str, type | tuple[type, ...]], place: str) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{place} is {type_of(found)}")
    for key, kind in entries.items():
        if key not in found or not isinstance(found[key], kind):
            raise ValueError(f"{place} has no {key!r}, or one of the wrong type")


def _check_names(found: dict[Any, Any], place: str) -> None:
    if not all(isinstance(name, str) for name in found):
        raise ValueError(f"{place} has keys that are not names")


def _check_in_backward(name: str, entry: Any) -> None:
    place = f"in_backward of {name!a}"
    _check(entry, {"kind": str, "settings": dict, "values": dict, "tensors": list}, place)
    _check_names(entry["settings"], place)
    _check_names(entry["values"], place)
    if (
        "params" in entry["settings"]
        or not _are_names(entry["tensors"])
        or set(entry["tensors"]) & set(entry["values"])
    ):
        raise ValueError(f"{place} has wrong names")
    if "blocks" in entry:
        _check_blocks(entry["blocks"], place)


def _check_blocks(blocks: Any, place: str) -> None:
    end = 0
    for block in blocks if isinstance(blocks, list) else [None]:
        if not isinstance(block, tuple) or [type(each) for each in block] != [int, int]:
            raise ValueError(f"{place} has wrong blocks")
        if block[0] != end or block[1] <= end:
            raise ValueError(f"{place} has blocks that do not follow each other")
        end = block[1]
    if not blocks:
        raise ValueError(f"{place} has no blocks")


def _check_optimizer(found: Any) -> None:
    _check(found, {"kind": str, "groups": list, "state": dict}, "optimizer")
    if not isinstance(found.get("any_order", False), bool):
        raise ValueError("optimizer has a wrong 'any_order'")
    for group in found["groups"]:
        _check(group, {"params": list}, "a group of optimizer")
        _check_names(group, "a group of optimizer")
        if not _are_names(group["params"]):
            raise ValueError("a group of optimizer has wrong params")
    _check_names(found["state"], "optimizer")
    for name, state in found["state"].items():
        place = f"the state of {name!a}"
        _check(state, {"values": dict, "tensors": list}, place)
        _check_names(state["values"], place)
        if not _are_names(state["tensors"]) or set(state["tensors"]) & set(state["values"]):
            raise ValueError(f"{place} has wrong names")


def _check_warm_ups(found: Any) -> None:
    if not isinstance(found, dict):
        raise ValueError("the warm-ups are no dict")
    _check_names(found, "warm-ups")
    for state in found.values():
        numbers = isinstance(state, list) and [type(each) for each in state] == [int, int]
        if not numbers or not all(0 <= each < 1 << 63 for each in state):
            raise ValueError("a warm-up has a wrong state")


def _are_names(found: list[Any]) -> bool:
    return all(isinstance(name, str) for name in found) and len(set(found)) == len(found)
