"""Devices that the user names."""

from __future__ import annotations

import contextlib

import torch

from recfx.errors import ConversionError, type_of


def usable_device(device: torch.device | str | int) -> torch.device:
    """The device, if this host has it.

    Raises:
        ConversionError: ``invalid_argument`` (it does not name a device), ``device_unavailable``.
    """
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
            what_to_do=_what_to_do(str(device)),
        ) from error
    return usable


def _what_to_do(name: str) -> str:
    kind, other = name.split(":")[0], "name a device of this host, such as 'cpu'."
    module = getattr(torch, kind, None)
    if kind == "npu" and module is None:
        return f"install torch_npu, Ascend's package for torch, and source CANN's environment script; or {other}"
    count = module.device_count() if module is not None and hasattr(module, "device_count") else 0
    return f"name one of the {count} that are here, {kind}:0 to {kind}:{count - 1}; or 'cpu'." if count else other


def not_on_meta_by_default() -> contextlib.AbstractContextManager[object]:
    """A context in which new tensors are on the CPU by default, if the caller has put them on meta."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else contextlib.nullcontext()
