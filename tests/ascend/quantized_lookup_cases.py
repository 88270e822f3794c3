"""The pooled lookup of quantized rows: 8 and 4 bits, rows at even and at odd addresses, odd dims, padding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from recfx.kernels.build.tiling import ASCEND_910B, lookup_rows
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_reference
from recfx.kernels.lookup.quantized_rows import quantize_rows
from tests.ascend.kernel_case import Call, KernelCase, Place
from tests.ascend.pooled_lookup_cases import ABOUT_A_BLOCK

_KERNEL = "recfx.kernels.lookup.quantized_lookup_triton:recfx_quantized_lookup"
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def cases() -> list[KernelCase]:
    """Every form in one block of columns, the other blocks up to that of 1,024, and fewer rows at once than fit."""
    pooling = ((0, 0), (1, 0), (0, 1), (1, 1))
    forms = [(bits, 64, *pool, "fp32") for bits in (8, 4) for pool in pooling]
    forms += [(bits, block, 1, 0, "fp32") for bits in (8, 4) for block in (2, 4, 16, 128, 256, 1024)]
    forms += [(8, 1, 1, 0, "fp32"), (8, 64, 1, 0, "fp16"), (4, 64, 1, 0, "fp16")]
    by_block = [_case(bits, block, bool(weighted), bool(mean), out) for bits, block, weighted, mean, out in forms]
    return [*by_block, _case(8, 64, True, False, "fp32", 16)]


def _case(bits: int, block: int, weighted: bool, mean: bool, out: str, rows: int | None = None) -> KernelCase:
    signature = {
        "rows_ptr": "*i64", "offsets_ptr": "*i64", "scales_ptr": "*fp32", "bytes_ptr": "*i8",
        "table_starts_ptr": "*i64", "row_bytes_ptr": "*i32", "first_columns_ptr": "*i32",
        **dict.fromkeys(("pooled_ptr", "pooled_0_ptr", "pooled_1_ptr"), f"*{out}"),
        "num_bags": "i32", "batch_size": "i32", "num_columns": "i32",
    }  # fmt: skip
    make = partial(_call, bits=bits, weighted=weighted, mean=mean, out=_DTYPES[out])
    dims = sorted({block, max(1, block - 1), max(1, block * 3 // 4), block // 2 + 1}, reverse=True)
    calls = {
        "several tables": partial(make, dims=dims, batch_size=9),
        "one bag": partial(make, dims=[block], batch_size=1),
        "empty bags": partial(make, dims=dims, batch_size=3, longest=0),
        "no bags": partial(make, dims=dims, batch_size=0),
        "long bags": partial(make, dims=[max(1, block - 1)], batch_size=2, longest=100),
        "bags of about a block": partial(make, dims=dims[:2], batch_size=len(ABOUT_A_BLOCK), lengths=ABOUT_A_BLOCK),
        "absent rows of an empty table": partial(make, dims=[block], batch_size=3, table_rows=0),
    }
    parts = [
        f"int{bits}",
        f"block_{block}",
        *["weighted"] * weighted,
        *["mean"] * mean,
        out,
        *[f"rows_{rows}"] * bool(rows),
    ]
    constexprs = {"BLOCK_D": block, "ROWS": lookup_rows(block, ASCEND_910B, rows), "BITS": bits}
    constexprs |= {"WEIGHTED": weighted, "MEAN": mean}
    programs = 1 if mean else 3 if weighted else 40  # bags share blocks where there are several in a program
    name = "-".join(["quantized_lookup", *parts])
    return KernelCase(name, _KERNEL, signature, constexprs, calls, programs, rows is not None)


def _call(
    place: Place, bits: int, weighted: bool, mean: bool, out: torch.dtype, dims: list[int],
    batch_size: int, longest: int = 6, table_rows: int = 11, lengths: Sequence[int] = (),
) -> Call:  # fmt: skip
    """Rows of several alignments; codes of all values; rows at both ends of every table."""
    draw = torch.Generator().manual_seed(sum(dims) + batch_size)
    alignments = [1, 16, 2]
    tables = [
        quantize_rows(torch.randn(table_rows, dim, generator=draw), bits, alignments[number % 3])
        for number, dim in enumerate(dims)
    ]
    for number, (table, dim) in enumerate(zip(tables, dims, strict=True)):
        table[:, 4:].random_(256, generator=draw)  # every code, and padding of any content
        table[:1, 4 : 4 + dim] = 255 if number % 2 else 0
    drawn = torch.randint(0, longest + 1, (len(dims) * batch_size,), generator=draw)
    of_bags = torch.tensor(lengths).repeat(len(dims)) if lengths else drawn
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), of_bags.cumsum(0)])
    rows = torch.randint(-1, table_rows, (int(offsets[-1]),), generator=draw)
    if table_rows:
        rows[:1], rows[-1:] = 0, table_rows - 1
    scales = torch.randn(rows.numel(), generator=draw) if weighted else None
    pooled = quantized_lookup_reference(rows, offsets, tables, dims, bits, list(range(len(dims))), mean, scales).to(out)
    placed = [place(table) for table in tables]
    starts = [table.data_ptr() - placed[0].data_ptr() for table in placed]
    columns = torch.tensor([0, *dims]).cumsum(0).to(torch.int32)
    written = place(torch.full_like(pooled, 7.0))
    first = placed[0].view(-1).view(torch.int8)
    arguments = [
        place(rows), place(offsets), place(torch.empty(0) if scales is None else scales), first,
        place(torch.tensor(starts)), place(torch.tensor([table.size(1) for table in tables], dtype=torch.int32)),
        place(columns), *[written] * 3, len(dims) * batch_size, batch_size, sum(dims),
    ]  # fmt: skip
    return Call(arguments, {"pooled_ptr": pooled}, keep=tuple(placed))  # the kernel reaches them from the first
