"""``bucketize.py`` in Triton, in two launches; between them, the lengths of the output are added up.

1.  ``recfx_bucket_counts`` finds the piece of every id, and counts the ids of each piece in each bag.
2.  ATen picks the counts that are the lengths of the output (``index_select``; of a whole feature, its own lengths),
    and makes offsets of them (``cumsum``). Backends have both, so there is no kernel for it.
3.  ``recfx_bucket_scatter`` copies the ids, bag by bag of the output.

Every value has one program that writes it, at a place that is known beforehand: there are no atomics, and the order of
ids does not depend on how programs are timed. Ids are scalars throughout, see ``mix64_triton.py``. In the forms for
GPUs, a lane has one bag, and lanes take turns together.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.index.mix64_triton import mix63

# What the route of a feature is for the kernels: int64 [F, FIELDS].
BORDERS_START = tl.constexpr(0)  # where its row borders begin among those of all features
PIECES = tl.constexpr(1)  # 0: not cut
DENSE_ROWS = tl.constexpr(2)  # of the table, as are the next three
ROWS = tl.constexpr(3)
BUCKETS = tl.constexpr(4)  # 0: ids are rows
MIXED_SEED = tl.constexpr(5)  # mix64 of the seed, 0 for seed 0
FIELDS = tl.constexpr(6)


@triton.jit
def _home_row(key, route_ptr):
    """``buckets.home_rows``."""
    home = key
    buckets = tl.load(route_ptr + BUCKETS)
    dense_rows = tl.load(route_ptr + DENSE_ROWS)
    if (buckets > 0) & ((key < 0) | (key >= dense_rows)):
        bucket = mix63(key, tl.load(route_ptr + MIXED_SEED)) % buckets
        home = dense_rows + bucket * (tl.load(route_ptr + ROWS) - dense_rows) // buckets
    return home


@triton.jit
def recfx_bucket_counts(
    ids_ptr,  # int64 [n]
    offsets_ptr,  # int64 [F * B + 1]
    routes_ptr,  # int64 [F, FIELDS]
    borders_ptr,  # int64, the row borders of all features
    pieces_ptr,  # int32 [n], the piece of each id: 0 if the feature is not cut, -1 if the id is no row of the table
    counts_ptr,  # int32 [F * B, most_pieces], how many ids of each bag are in each piece
    outside_ptr,  # int64 [programs], the first position whose id is no row of its table; n if there is none
    num_bags,  # F * B
    batch_size,  # B
    num_ids,  # n
    most_pieces,  # of any feature, at least 1
    BLOCK_W: tl.constexpr,  # a power of two, at least most_pieces
):
    """The piece of each id, and the numbers of ids by bag and piece. Programs take whole bags."""
    lanes = tl.arange(0, BLOCK_W)
    numbers = lanes.to(tl.float32)  # Ascend's documentation has comparisons of integers as loops over the elements
    outside = tl.cast(num_ids, tl.int64)
    for bag in range(tl.program_id(0), num_bags, tl.num_programs(0)):
        route_ptr = routes_ptr + (bag // batch_size) * FIELDS
        inner_borders_ptr = borders_ptr + tl.load(route_ptr + BORDERS_START) + 1
        pieces = tl.load(route_ptr + PIECES)
        rows = tl.where(tl.load(route_ptr + BUCKETS) == 0, tl.load(route_ptr + ROWS), -1)  # -1: any id is valid
        counts = tl.zeros((BLOCK_W,), dtype=tl.int32)
        for position in range(tl.load(offsets_ptr + bag), tl.load(offsets_ptr + bag + 1)):
            key = tl.load(ids_ptr + position)
            first = tl.full((), 0, tl.int64)
            if (pieces > 0) & (rows >= 0) & ((key < 0) | (key >= rows)):
                first = tl.full((), -1, tl.int64)
                outside = tl.minimum(outside, position)
            elif pieces > 1:
                home = _home_row(key, route_ptr)
                last = pieces - 1
                while first < last:  # the piece is the number of inner borders at or below the home row
                    middle = (first + last) // 2
                    if tl.load(inner_borders_ptr + middle) <= home:
                        first = middle + 1
                    else:
                        last = middle
            piece = first.to(tl.int32)
            tl.store(pieces_ptr + position, piece)
            counts += (numbers == piece.to(tl.float32)).to(tl.int32)
        tl.store(counts_ptr + tl.cast(bag, tl.int64) * most_pieces + lanes, counts, mask=lanes < most_pieces)
    tl.store(outside_ptr + tl.program_id(0), outside)


@triton.jit
def recfx_bucket_scatter(
    ids_ptr,  # int64 [n]
    weights_ptr,  # floats [n], read if WEIGHTED
    offsets_ptr,  # int64 [F * B + 1]
    pieces_ptr,  # int32 [n], from recfx_bucket_counts
    routes_ptr,  # int64 [F, FIELDS]
    borders_ptr,  # int64, the row borders of all features
    sources_ptr,  # int32 [entries], the feature of each entry
    entry_pieces_ptr,  # int32 [entries], its piece; -1: all ids of the feature
    new_offsets_ptr,  # int64 [entries * B + 1]
    new_ids_ptr,  # int64
    new_weights_ptr,  # floats
    num_bags,  # entries * B
    batch_size,  # B
    WEIGHTED: tl.constexpr,
):
    """Fill the bags of the output. Programs take whole ones; each is sought in its bag until it is complete."""
    for bag in range(tl.program_id(0), num_bags, tl.num_programs(0)):
        entry = bag // batch_size
        feature = tl.load(sources_ptr + entry)
        piece = tl.load(entry_pieces_ptr + entry)
        route_ptr = routes_ptr + feature * FIELDS
        base = tl.full((), 0, tl.int64)
        if (piece >= 0) & (tl.load(route_ptr + BUCKETS) == 0):
            base = tl.load(borders_ptr + tl.load(route_ptr + BORDERS_START) + piece)
        position = tl.load(offsets_ptr + feature * batch_size + (bag - entry * batch_size))
        place = tl.load(new_offsets_ptr + bag)
        end = tl.load(new_offsets_ptr + bag + 1)
        while place < end:
            if (piece < 0) | (tl.load(pieces_ptr + position) == piece):
                tl.store(new_ids_ptr + place, tl.load(ids_ptr + position) - base)
                if WEIGHTED:
                    tl.store(new_weights_ptr + place, tl.load(weights_ptr + position))
                place += 1
            position += 1


@triton.jit
def recfx_bucket_counts_on_gpu(
    ids_ptr, offsets_ptr, routes_ptr, borders_ptr, pieces_ptr,
    counts_ptr,  # zeros
    outside_ptr, num_bags, batch_size, num_ids, most_pieces,
    BAGS: tl.constexpr,  # of a program
):  # fmt: skip
    """``recfx_bucket_counts``, with its parameters."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    is_bag = bag < num_bags
    route_ptr = routes_ptr + bag // tl.maximum(batch_size, 1) * FIELDS
    pieces = tl.load(route_ptr + PIECES, mask=is_bag, other=0)
    rows = tl.load(route_ptr + ROWS, mask=is_bag, other=0)
    buckets = tl.load(route_ptr + BUCKETS, mask=is_bag, other=0)
    dense_rows = tl.load(route_ptr + DENSE_ROWS, mask=is_bag, other=0)
    seed = tl.load(route_ptr + MIXED_SEED, mask=is_bag, other=0)
    inner_borders_ptr = borders_ptr + tl.load(route_ptr + BORDERS_START, mask=is_bag, other=0) + 1
    begin = tl.load(offsets_ptr + bag, mask=is_bag, other=0)
    end = tl.load(offsets_ptr + bag + 1, mask=is_bag, other=0)
    outside = tl.zeros_like(bag) + num_ids
    for turn in range(0, tl.max(end - begin, 0)):
        position = begin + turn
        inside = position < end
        key = tl.load(ids_ptr + position, mask=inside, other=0)
        is_outside = inside & (pieces > 0) & (buckets == 0) & ((key < 0) | (key >= rows))
        is_hashed = (buckets > 0) & ((key < 0) | (key >= dense_rows))
        bucket = mix63(key, seed) % tl.maximum(buckets, 1)
        home = tl.where(is_hashed, dense_rows + bucket * (rows - dense_rows) // tl.maximum(buckets, 1), key)
        first = tl.zeros_like(bag)
        last = tl.where(inside & (pieces > 1) & (is_outside == 0), pieces - 1, 0)
        while tl.max(last - first, 0) > 0:  # the piece is the number of inner borders at or below the home row
            middle = (first + last) // 2
            going = first < last
            is_below = going & (tl.load(inner_borders_ptr + middle, mask=going, other=0) <= home)
            first = tl.where(is_below, middle + 1, first)
            last = tl.where(is_below, last, middle)
        tl.store(pieces_ptr + position, tl.where(is_outside, -1, first).to(tl.int32), mask=inside)
        tl.atomic_add(counts_ptr + bag * most_pieces + first, 1, mask=inside & (is_outside == 0))
        outside = tl.minimum(outside, tl.where(is_outside, position, num_ids))
    tl.store(outside_ptr + tl.program_id(0), tl.min(outside, 0))


@triton.jit
def recfx_bucket_scatter_on_gpu(
    ids_ptr, weights_ptr, offsets_ptr, pieces_ptr, routes_ptr, borders_ptr, sources_ptr, entry_pieces_ptr,
    new_offsets_ptr, new_ids_ptr, new_weights_ptr, num_bags, batch_size, WEIGHTED: tl.constexpr,
    BAGS: tl.constexpr,  # of a program
):  # fmt: skip
    """``recfx_bucket_scatter``, with its parameters."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    is_bag = bag < num_bags
    entry = bag // tl.maximum(batch_size, 1)
    feature = tl.load(sources_ptr + entry, mask=is_bag, other=0)
    piece = tl.load(entry_pieces_ptr + entry, mask=is_bag, other=-1)
    route_ptr = routes_ptr + feature * FIELDS
    is_rows = (piece >= 0) & (tl.load(route_ptr + BUCKETS, mask=is_bag, other=0) == 0)
    start = tl.load(route_ptr + BORDERS_START, mask=is_bag, other=0)
    base = tl.load(borders_ptr + start + piece, mask=is_rows, other=0)
    source = bag + (feature - entry) * batch_size
    begin = tl.load(offsets_ptr + source, mask=is_bag, other=0)
    end = tl.load(offsets_ptr + source + 1, mask=is_bag, other=0)
    place = tl.load(new_offsets_ptr + bag, mask=is_bag, other=0)
    for turn in range(0, tl.max(end - begin, 0)):
        position = begin + turn
        inside = position < end
        taken = inside & ((piece < 0) | (tl.load(pieces_ptr + position, mask=inside, other=0) == piece))
        tl.store(new_ids_ptr + place, tl.load(ids_ptr + position, mask=taken, other=0) - base, mask=taken)
        if WEIGHTED:
            tl.store(new_weights_ptr + place, tl.load(weights_ptr + position, mask=taken, other=0.0), mask=taken)
        place += taken.to(tl.int64)
