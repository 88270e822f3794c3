"""Devices that the user names."""

from __future__ import annotations

import torch

from recfx.errors import ConversionError


def usable_device(device: torch.device | str | int) -> torch.device:
    """The device, if this host has it.

    Raises:
        ConversionError: ``invalid_argument`` (it does not name a device), ``device_unavailable``.
    """
    if not isinstance(device, (torch.device, str, int)) or isinstance(device, bool):
        raise ConversionError(
            f"device is a {type(device).__name__}.",
            reason="invalid_argument",
            what_to_do="pass a torch.device or its name, such as 'cpu'.",
        )
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with the backend
        raise ConversionError(
            f"there is no device {device!r} here ({error}).",
            reason="device_unavailable",
            what_to_do="name a device of this host, such as 'cpu'.",
        ) from error
    return found
