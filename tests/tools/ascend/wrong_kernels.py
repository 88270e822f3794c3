"""Kernels that are wrong on purpose, one way each: the check that should notice is shown to notice."""

import triton
import triton.language as tl


@triton.jit
def recfx_wrong_reads_one_more(rows_ptr, table_ptr, sums_ptr, num_rows, dim, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for position in range(0, num_rows):
        row = tl.load(rows_ptr + position)
        total += tl.load(table_ptr + row * dim + columns, mask=columns <= dim, other=0.0)
    tl.store(sums_ptr + columns, total, mask=columns < dim)


@triton.jit
def recfx_wrong_has_no_mask(rows_ptr, table_ptr, sums_ptr, num_rows, dim, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for position in range(0, num_rows):
        row = tl.load(rows_ptr + position)
        total += tl.load(table_ptr + row * dim + columns)
    tl.store(sums_ptr + columns, total, mask=columns < dim)


@triton.jit
def recfx_wrong_sums_backwards(rows_ptr, table_ptr, sums_ptr, num_rows, dim, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for position in range(0, num_rows):
        row = tl.load(rows_ptr + num_rows - 1 - position)
        total += tl.load(table_ptr + row * dim + columns, mask=columns < dim, other=0.0)
    tl.store(sums_ptr + columns, total, mask=columns < dim)


@triton.jit
def recfx_wrong_needs_many_blocks(rows_ptr, table_ptr, sums_ptr, num_rows, dim, BLOCK_D: tl.constexpr):
    """Right, but its block does not fit into the unified buffer."""
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for position in range(0, num_rows):
        row = tl.load(rows_ptr + position)
        total += tl.load(table_ptr + row * dim + columns, mask=columns < dim, other=0.0)
    tl.store(sums_ptr + columns, total, mask=columns < dim)


@triton.jit
def recfx_wrong_masks_a_scalar(rows_ptr, table_ptr, sums_ptr, num_rows, dim, BLOCK_D: tl.constexpr):
    """Right in the interpreter; on Ascend a scalar is read whatever its mask says, here one behind the last."""
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    row = tl.load(rows_ptr)
    for position in range(0, num_rows):
        total += tl.load(table_ptr + row * dim + columns, mask=columns < dim, other=0.0)
        row = tl.load(rows_ptr + position + 1, mask=position + 1 < num_rows, other=0)
    tl.store(sums_ptr + columns, total, mask=columns < dim)


@triton.jit
def recfx_wrong_takes_codes_as_signed(rows_ptr, table_ptr, sums_ptr, num_rows, dim, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for position in range(0, num_rows):
        row = tl.load(rows_ptr + position)
        total += tl.load(table_ptr + row * dim + columns, mask=columns < dim, other=0).to(tl.float32)
    tl.store(sums_ptr + columns, total, mask=columns < dim)


@triton.jit
def recfx_wrong_shifts_unsigned(ids_ptr, hashes_ptr, num_ids, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + lanes, mask=lanes < num_ids, other=0).to(tl.uint32, bitcast=True)
    tl.store(hashes_ptr + lanes, (ids >> 7).to(tl.int32, bitcast=True), mask=lanes < num_ids)


@triton.jit
def recfx_wrong_multiplies_high(ids_ptr, hashes_ptr, num_ids, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + lanes, mask=lanes < num_ids, other=0).to(tl.uint32, bitcast=True)
    high = tl.umulhi(ids, tl.full((BLOCK,), 0x9E3779B9, tl.uint32))
    tl.store(hashes_ptr + lanes, high.to(tl.int32, bitcast=True), mask=lanes < num_ids)


@triton.jit
def recfx_wrong_trusts_cas(ids_ptr, hashes_ptr, num_ids, BLOCK: tl.constexpr):
    for place in range(0, num_ids):
        id_before = tl.atomic_cas(hashes_ptr + place, 0, tl.load(ids_ptr + place))
        if id_before == 0:
            tl.store(ids_ptr + place, -1)


@triton.jit
def recfx_wrong_stores_every_other(ids_ptr, hashes_ptr, num_ids, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + lanes, mask=lanes < num_ids, other=0)
    tl.store(hashes_ptr + lanes, ids, mask=ids > 0)


@triton.jit
def recfx_wrong_hashes_wide(ids_ptr, hashes_ptr, num_ids, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + lanes, mask=lanes < num_ids, other=0).to(tl.int64)
    mixed = ids * 0x1E3779B97F4A7C15
    tl.store(hashes_ptr + lanes, (mixed & 0x7FFFFFFF).to(tl.int32), mask=lanes < num_ids)


@triton.jit
def recfx_wrong_computes_in_double(ids_ptr, hashes_ptr, num_ids, BLOCK: tl.constexpr):
    for place in range(0, num_ids):
        half = tl.load(ids_ptr + place).to(tl.float64) * 0.5
        tl.store(hashes_ptr + place, half.to(tl.int32))


@triton.jit
def recfx_wrong_reads_what_it_wrote(rows_ptr, table_ptr, sums_ptr, num_rows, dim, BLOCK_D: tl.constexpr):
    """Right in the interpreter and on the CPU."""
    columns = tl.arange(0, BLOCK_D)
    for position in range(0, num_rows):
        row = tl.load(rows_ptr + position)
        total = tl.load(sums_ptr + columns, mask=columns < dim, other=0.0)
        total += tl.load(table_ptr + row * dim + columns, mask=columns < dim, other=0.0)
        tl.store(sums_ptr + columns, total, mask=columns < dim)


@triton.jit
def recfx_wrong_carries_a_boolean(ids_ptr, hashes_ptr, num_ids, BLOCK: tl.constexpr):
    number = 0
    goes_on = number < num_ids
    while goes_on:
        goes_on = tl.load(ids_ptr + number) != 0
        if goes_on:
            number += 1
            goes_on = number < num_ids
    tl.store(hashes_ptr, number)
