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
        device = value.device
    elif isinstance(value, (KeyedJaggedTensor, JaggedTensor, KeyedTensor)):
        device = value.device()
    else:
        value.record_stream(stream)
        return
    if device.type != "cpu":
        value.record_stream(stream)
