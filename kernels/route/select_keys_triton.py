"""``select_keys.py`` in Triton. Ids of a key are copied as they lie, in vectors; each program writes a run of them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

LANES: tl.constexpr = tl.constexpr(1024)
"""How many bags or ids are copied at once."""


@triton.jit
def recfx_select_keys(
    ids_ptr,  # int64 or int32 [n]
    weights_ptr,  # floats [n], read if WEIGHTED
    offsets_ptr,  # int64 [keys * B + 1], below 2**31
    positions_ptr,  # int64 [K], the keys to be copied, in order
    new_ids_ptr,  # written, as many as these keys have
    new_weights_ptr,  # written if WEIGHTED
    new_offsets_ptr,  # int64 [K * B + 1], written
    num_keys,  # K
    batch_size,  # B
    num_new_ids,
    bags_per_program,  # a multiple of 16: programs write to different lines of the memory
    ids_per_program,  # likewise
    WEIGHTED: tl.constexpr,
):
    """Copy the bags of some keys, and say where they begin."""
    program = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    first_bag = program * bags_per_program
    last_bag = first_bag + bags_per_program
    first_id = program * ids_per_program
    last_id = tl.minimum(first_id + ids_per_program, num_new_ids)
    if program == 0:
        tl.store(new_offsets_ptr, tl.full((), 0, tl.int64))
    begin = 0  # where the ids of the key begin in the new ones
    for key in range(0, num_keys):
        position = tl.load(positions_ptr + key)
        bags_ptr = offsets_ptr + position * batch_size
        old = tl.cast(tl.load(bags_ptr), tl.int32)
        end = begin + tl.cast(tl.load(bags_ptr + batch_size), tl.int32) - old
        first = tl.maximum(first_bag - key * batch_size, 0)
        last = tl.minimum(last_bag - key * batch_size, batch_size)
        for start in range(first, last, LANES):
            mask = lanes < last - start
            ends = tl.load(bags_ptr + 1 + start + lanes, mask=mask, other=0).to(tl.int32) + (begin - old)
            tl.store(new_offsets_ptr + key * batch_size + 1 + start + lanes, ends.to(tl.int64), mask=mask)
        for start in range(tl.maximum(first_id, begin), tl.minimum(last_id, end), LANES):
            mask = lanes < tl.minimum(last_id, end) - start
            ids = tl.load(ids_ptr + (old - begin) + start + lanes, mask=mask, other=0)
            tl.store(new_ids_ptr + start + lanes, ids, mask=mask)
            if WEIGHTED:
                weights = tl.load(weights_ptr + (old - begin) + start + lanes, mask=mask, other=0.0)
                tl.store(new_weights_ptr + start + lanes, weights, mask=mask)
        begin = end
