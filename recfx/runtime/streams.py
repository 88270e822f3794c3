"""Memory that work on another stream still uses."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def record_stream(value: Any, stream: Any) -> None:
    """Keep the memory of ``value`` for ``stream``. What is on the host needs no keeping, and torch refuses it there.

    Args:
        value: a tensor, a jagged or keyed tensor, a list of them, or anything else with ``record_stream``.
        stream: of an accelerator.
    """
    if isinstance(value, KJTList):
        for each in value:
            record_stream(each, stream)
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
