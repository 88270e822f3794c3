"""The dtypes that a checkpoint may have, by the names that its files give them."""

from __future__ import annotations

import torch

from recfx.errors import CheckpointError

_ALL = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
)  # fmt: skip
DTYPES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in _ALL}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose content is not simply its elements: quantized ones, say, and sparse ones.

    Raises:
        CheckpointError: ``value_not_supported``.
    """
    if tensor.dtype in NAMES and tensor.layout == torch.strided:
        return
    raise CheckpointError(
        f"{name} is a tensor of dtype {tensor.dtype} and layout {tensor.layout}.",
        reason="value_not_supported",
        what_to_do="save it by other means, and register it with persistent=False.",
    )
