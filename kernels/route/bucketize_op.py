"""``bucketize_triton.py`` as the operator ``recfx::bucketize_triton``: the contract of ``bucketize.py``, on a device.

The host waits for the device once per call: for the number of ids of the output, and whether the batch is valid.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import launch
from recfx.kernels.index.mix64 import mix64_integer
from recfx.kernels.route import bucketize_reference
from recfx.kernels.route.bucketize import Routes, fake, flat


def bucketize(
    ids: Tensor, lengths: Tensor, batch_size: int, routes: Routes, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The contract of ``bucketize.bucketize``, for tensors on any one device that has the kernels."""
    new_ids, new_lengths, new_weights = bucketize_triton(ids, lengths, batch_size, *flat(routes), weights)
    return new_ids, new_lengths, None if weights is None else new_weights


@torch.library.custom_op("recfx::bucketize_triton", mutates_args=())
def bucketize_triton(
    ids: Tensor,
    lengths: Tensor,
    batch_size: int,
    borders: list[int],
    border_counts: list[int],
    dense_rows: list[int],
    rows: list[int],
    buckets: list[int],
    seeds: list[int],
    sources: list[int],
    pieces: list[int],
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of ``recfx::bucketize``; without weights, the third tensor of the result is empty."""
    starts = [0, *accumulate(border_counts)]
    row_borders = [borders[start : start + count] for start, count in zip(starts, border_counts, strict=False)]
    routes = Routes(row_borders, dense_rows, rows, buckets, seeds, sources, pieces)
    if launch.simulated(ids.device) or lengths.numel() == 0 or not sources:
        new_ids, new_lengths, new_weights = bucketize_reference.bucketize(ids, lengths, batch_size, routes, weights)
        return new_ids, new_lengths, ids.new_empty(0, dtype=torch.float32) if new_weights is None else new_weights
    bucketize_reference.check_routes(lengths.numel(), ids.numel(), batch_size, routes, weights)
    return _launch(ids, lengths, batch_size, routes, weights)


def _launch(
    ids: Tensor, lengths: Tensor, batch_size: int, routes: Routes, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from recfx.kernels.route.bucketize_triton import recfx_bucket_counts, recfx_bucket_scatter

    device, bags, features = ids.device, lengths.numel(), len(routes.rows)
    on_device = _routes_on(device, *(tuple(map(tuple, routes.row_borders)), *map(tuple, routes[1:])))
    most = on_device.most_pieces
    ends = lengths.cumsum(0, dtype=torch.int64)
    is_invalid = (lengths < 0).any() | (ends[-1] != ids.numel())
    offsets = _from_zero(ends.clamp(0, ids.numel()))  # nothing outside of the ids is read, whatever the lengths are
    found = torch.empty(ids.numel(), dtype=torch.int32, device=device)
    counts = torch.empty(bags, most, dtype=torch.int32, device=device)
    programs = launch.programs(device, bags)
    outside = torch.empty(programs, dtype=torch.int64, device=device)
    launch.launch(
        recfx_bucket_counts, programs, ids, offsets, on_device.fields, on_device.borders, found, counts, outside,
        bags, batch_size, ids.numel(), most, BLOCK_W=1 << (most - 1).bit_length(),
    )  # fmt: skip
    choices = torch.cat([counts.to(lengths.dtype).view(features, batch_size, most), lengths.view(features, -1, 1)], 2)
    choices = choices.transpose(1, 2).reshape(-1, batch_size)
    new_lengths = choices.index_select(0, on_device.choices).view(-1)
    new_offsets = _from_zero(new_lengths.cumsum(0, dtype=torch.int64))
    total, first_outside, invalid = torch.stack([new_offsets[-1], outside.min(), is_invalid.long()]).tolist()
    if invalid:
        bucketize_reference.check_lengths(ids, lengths)
    if first_outside < ids.numel():
        feature = int((offsets[::batch_size] <= first_outside).sum()) - 1
        bucketize_reference.refuse_outside(int(ids[first_outside]), feature, routes.rows[feature])
    new_ids = ids.new_empty(total)
    new_weights = ids.new_empty(0, dtype=torch.float32) if weights is None else weights.new_empty(total)
    launch.launch(
        recfx_bucket_scatter, launch.programs(device, new_lengths.numel()), ids,
        new_weights if weights is None else weights, offsets, found, on_device.fields, on_device.borders,
        on_device.sources, on_device.pieces, new_offsets, new_ids, new_weights,
        new_lengths.numel(), batch_size, WEIGHTED=weights is not None,
    )  # fmt: skip
    return new_ids, new_lengths, new_weights


def _from_zero(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends])


class _RoutesOnDevice(NamedTuple):
    """``Routes`` as the kernels read them."""

    fields: Tensor  # int64 [F, FIELDS]
    borders: Tensor  # int64, of all features
    sources: Tensor  # int32 [entries]
    pieces: Tensor  # int32 [entries]
    choices: Tensor  # int64 [entries]: which of a feature's counts, or its length, is the length of the entry
    most_pieces: int


@lru_cache(maxsize=256)
def _routes_on(
    device: torch.device,
    row_borders: tuple[tuple[int, ...], ...],
    dense_rows: tuple[int, ...],
    rows: tuple[int, ...],
    buckets: tuple[int, ...],
    seeds: tuple[int, ...],
    sources: tuple[int, ...],
    pieces: tuple[int, ...],
) -> _RoutesOnDevice:
    starts = [0, *accumulate(map(len, row_borders))][:-1]
    fields = [
        [start, max(0, len(borders) - 1), dense, number, bucket, mix64_integer(seed) if seed else 0]
        for start, borders, dense, number, bucket, seed in zip(
            starts, row_borders, dense_rows, rows, buckets, seeds, strict=True
        )
    ]
    most = max(1, *(len(borders) - 1 for borders in row_borders))
    choices = [
        source * (most + 1) + (piece if piece >= 0 else most) for source, piece in zip(sources, pieces, strict=True)
    ]

    def on_device(numbers: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    return _RoutesOnDevice(
        fields=on_device(fields, torch.int64),
        borders=on_device(tuple(chain.from_iterable(row_borders)), torch.int64),
        sources=on_device(sources, torch.int32),
        pieces=on_device(pieces, torch.int32),
        choices=on_device(choices, torch.int64),
        most_pieces=most,
    )


bucketize_triton.register_fake(fake)
