"""Copies the bags of some keys of a batch: a selection, another order, or repeats.

``recfx::select_keys_triton`` runs by the kernel in ``select_keys_triton.py``.
"""

import torch
from torch import Tensor

from recfx.kernels.build import launch
from recfx.kernels.build.plain_arguments import triton_operator

_LINE = 16  # ids or bags: programs write to different lines of the memory
_LANES = 1024  # bags or ids that the kernel copies at once


def select_keys(
    ids: Tensor, offsets: Tensor, positions: list[int], batch_size: int, count: int, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Copy the bags of the keys at ``positions``, in that order, by the kernel. The host does not wait for the device.

    Args:
        ids: int64 or int32 ``[n]``, ``n`` below 2**31.
        offsets: int64 ``[keys * B + 1]``, where bags begin; of at least one bag.
        positions: repeats are allowed.
        batch_size: ``B``.
        count: how many ids these keys have together.
        weights: floats ``[n]``, copied along; no gradient flows back.

    Returns:
        ids, offsets, and weights if they were given.
    """
    new_ids, new_offsets, new_weights = select_keys_triton(ids, offsets, positions, batch_size, count, weights)
    return new_ids, new_offsets, None if weights is None else new_weights


@triton_operator("recfx::select_keys_triton")
def select_keys_triton(
    ids: Tensor, offsets: Tensor, positions: list[int], batch_size: int, count: int, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``select_keys``, which has ``count`` ids then; without weights, the third tensor is empty."""
    from recfx.kernels.route.select_keys_triton import recfx_select_keys

    made = _made(ids, offsets, positions, batch_size, count, weights)
    new_ids, new_offsets, new_weights = made
    bags = new_offsets.numel() - 1
    programs = launch.programs(ids.device, -(-max(bags, count) // _LANES), "recfx_select_keys")
    bags_each, ids_each = (-(-number // (programs * _LINE)) * _LINE for number in (bags, count))
    launch.launch(
        recfx_select_keys, programs, ids, ids if weights is None else weights, offsets,
        launch.numbers_on(ids.device, tuple(positions)), new_ids, new_weights, new_offsets,
        len(positions), batch_size, count, bags_each, ids_each, WEIGHTED=weights is not None,
    )  # fmt: skip
    return made


@select_keys_triton.register_fake
def _made(
    ids: Tensor, offsets: Tensor, positions: list[int], batch_size: int, count: int, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    new_weights = ids.new_empty(0, dtype=torch.float32) if weights is None else weights.new_empty(count)
    return ids.new_empty(count), offsets.new_empty(len(positions) * batch_size + 1), new_weights


def select_keys_reference(
    ids: Tensor, offsets: Tensor, positions: list[int], batch_size: int, count: int, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``select_keys_triton`` in ATen, key by key; it waits for the device."""
    new_ids, new_offsets, new_weights, begin = [ids[:0]], [offsets[:1] - offsets[:1]], [], 0
    for position in positions:
        bags = offsets[position * batch_size : (position + 1) * batch_size + 1]
        first, last = int(bags[0]), int(bags[-1])
        new_ids.append(ids[first:last])
        new_offsets.append(bags[1:] - first + begin)
        if weights is not None:
            new_weights.append(weights[first:last])
        begin += last - first
    weights = torch.cat(new_weights) if new_weights else ids.new_empty(0, dtype=torch.float32)
    return torch.cat(new_ids), torch.cat(new_offsets), weights
