"""The pooled lookup, in every compiled form and on the shapes that have gone wrong elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from recfx.kernels.build.tiling import ASCEND_910B, lookup_rows
from recfx.kernels.lookup import pooled_lookup_reference
from tests.ascend.kernel_case import Call, KernelCase, Place

_KERNEL = "recfx.kernels.lookup.pooled_lookup_triton:recfx_pooled_lookup"
ABOUT_A_BLOCK = (8, 8, 7, 1, 7, 1, 0, 16, 15, 1, 9, 17, 6, 0, 0, 1, 2, 3, 8, 4, 5, 10, 11, 0, 12, 8, 13, 14, 5, 0)
"""Lengths of bags: some end where a block of 8, 16 or 32 rows does, or a row before or after; all fill six of 32."""
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cases() -> list[KernelCase]:
    """Sums, means and weighted sums for every dtype, every block of columns up to that of 1,024, and fewer rows at once
    than fit, which are in use where they were measured to be faster.
    """
    forms = [(dtype, 64, weighted, mean) for dtype in _DTYPES for weighted, mean in ((0, 0), (1, 0), (0, 1))]
    forms += [("fp32", block, 1, 0) for block in (1, 4, 16, 128, 256, 1024)]
    by_block = [_case(dtype, block, bool(weighted), bool(mean)) for dtype, block, weighted, mean in forms]
    return [*by_block, _case("fp32", 64, True, False, 8)]


def _case(dtype: str, block: int, weighted: bool, mean: bool, rows: int | None = None) -> KernelCase:
    signature = {
        "rows_ptr": "*i64", "offsets_ptr": "*i64", "scales_ptr": "*fp32", "weights_ptr": f"*{dtype}",
        "table_starts_ptr": "*i64", "first_columns_ptr": "*i32",
        **dict.fromkeys(("pooled_ptr", "pooled_0_ptr", "pooled_1_ptr"), "*fp32"),
        "num_bags": "i32", "batch_size": "i32", "num_columns": "i32",
    }  # fmt: skip
    make = partial(_call, dtype=dtype, weighted=weighted, mean=mean)
    dims = sorted({block, max(1, block * 3 // 4), max(1, block // 2 + 1)}, reverse=True)
    calls = {
        "several tables": partial(make, dims=dims, batch_size=9),
        "one bag": partial(make, dims=[block], batch_size=1),
        "empty bags": partial(make, dims=dims, batch_size=3, longest=0),
        "no bags": partial(make, dims=dims, batch_size=0),
        "long bags": partial(make, dims=[block], batch_size=2, longest=100),
        "bags of about a block": partial(make, dims=dims[:2], batch_size=len(ABOUT_A_BLOCK), lengths=ABOUT_A_BLOCK),
    }
    if weighted:
        calls["absent rows whose weights are no numbers"] = partial(make, dims=dims, batch_size=9, not_finite=True)
    name = "-".join(["pooled_lookup", dtype, f"block_{block}", *["weighted"] * weighted, *["mean"] * mean])
    name += f"-rows_{rows}" if rows else ""
    constexprs = {"BLOCK_D": block, "ROWS": lookup_rows(block, ASCEND_910B, rows), "WEIGHTED": weighted, "MEAN": mean}
    programs = 1 if mean else 3 if weighted else 40  # bags share blocks where there are several in a program
    return KernelCase(name, _KERNEL, signature, constexprs, calls, programs, rows is not None)


def _call(
    place: Place, dtype: str, weighted: bool, mean: bool, dims: list[int], batch_size: int, longest: int = 6,
    not_finite: bool = False, lengths: Sequence[int] = (),
) -> Call:  # fmt: skip
    """Rows at both ends of every table, absent rows, and empty bags; the tables lie apart from each other."""
    draw = torch.Generator().manual_seed(sum(dims) + batch_size)
    tables = [torch.randn(11, dim, generator=draw).to(_DTYPES[dtype]) for dim in dims]
    drawn = torch.randint(0, longest + 1, (len(dims) * batch_size,), generator=draw)
    of_bags = torch.tensor(lengths).repeat(len(dims)) if lengths else drawn
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), of_bags.cumsum(0)])
    rows = torch.randint(-1, 11, (int(offsets[-1]),), generator=draw)
    rows[:1], rows[-1:] = 0, 10
    scales = torch.rand(rows.numel(), generator=draw) if weighted else None
    if scales is not None and not_finite:
        scales[rows < 0] = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(rows.numel())[
            : int((rows < 0).sum())
        ]
    pooled = pooled_lookup_reference.pooled_lookup(rows, offsets, tables, list(range(len(dims))), mean, scales)
    placed = [place(table) for table in tables]
    starts = [(table.data_ptr() - placed[0].data_ptr()) // table.element_size() for table in placed]
    columns = torch.tensor([0, *dims]).cumsum(0).to(torch.int32)
    written = place(torch.full_like(pooled, 7.0))
    arguments = [
        place(rows), place(offsets), place(torch.empty(0) if scales is None else scales), placed[0],
        place(torch.tensor(starts)), place(columns), *[written] * 3,
        len(dims) * batch_size, batch_size, sum(dims),
    ]  # fmt: skip
    kept = tuple(placed)  # the kernel reaches them from the first
    return Call([*arguments], {"pooled_ptr": pooled}, keep=kept)
