"""The device of the result."""

from __future__ import annotations

import torch
from torch import nn

from recfx.collections.collection import unsharded_collections
from recfx.collections.devices import usable_device


def place(converted: nn.Module, device: torch.device | str | None) -> None:
    """Move the model; tables on meta are allocated and initialised. With None, everything stays where it is."""
    if device is None:
        return
    device = usable_device(device)
    for collection in unsharded_collections(converted).values():
        if any(weight.is_meta for weight in collection.parameters()):
            collection.to_empty(device=device)
            collection.reset_parameters()
    converted.to(device)
