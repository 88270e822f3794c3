"""Range check of ids that are their own rows, all keys of a batch in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from . import library


def first_out_of_range(values: Tensor, key_offsets: Tensor, rows_per_key: Tensor) -> int:
    """Position in ``values`` of the first id that is not ``0 <= id < rows_per_key`` of its key; -1 if all are fine.

    Args:
        values: int64 or int32 ``[n]``, the ids of all keys one key after the other.
        key_offsets: int64 ``[F + 1]``: key ``f`` has ``values[key_offsets[f]:key_offsets[f + 1]]``. Ascending, within
            ``[0, n]``; values outside of it are not looked at.
        rows_per_key: int64 ``[F]``; -1 leaves the key unchecked.

    Raises:
        RuntimeError: shapes or dtypes other than these, or offsets that do not ascend within ``values``.
    """
    if values.device.type == "cpu" and library.load():
        key_offsets, rows_per_key = key_offsets.cpu(), rows_per_key.cpu()
        return int(torch.ops.recfx.first_out_of_range(values, key_offsets, rows_per_key))
    return int(first_out_of_range_reference(values, key_offsets, rows_per_key))


def first_out_of_range_reference(values: Tensor, key_offsets: Tensor, rows_per_key: Tensor) -> Tensor:
    """``first_out_of_range`` in ATen, as an int64 scalar tensor, on any device. Scriptable."""
    key_offsets = key_offsets.to(values.device)
    lengths = key_offsets[1:] - key_offsets[:-1]
    if bool((lengths < 0).any()) or int(key_offsets[0]) < 0 or int(key_offsets[-1]) > values.numel():
        raise RuntimeError("recfx::first_out_of_range: key_offsets must ascend within the values")
    begin, end = int(key_offsets[0]), int(key_offsets[-1])
    checked = values[begin:end]
    rows = torch.repeat_interleave(rows_per_key.to(values.device), lengths)
    bad = torch.nonzero((rows >= 0) & ((checked < 0) | (checked >= rows))).squeeze(1)
    if bad.numel() == 0:
        return torch.full([], -1, dtype=torch.int64, device=values.device)
    return bad[0] + begin


@library.when_loaded
def _register_fakes() -> None:
    @torch.library.register_fake("recfx::first_out_of_range")
    def _first_out_of_range(values: Tensor, key_offsets: Tensor, rows_per_key: Tensor) -> Tensor:
        return key_offsets.new_empty([])
