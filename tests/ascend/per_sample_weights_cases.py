"""The gradient with respect to per-sample weights, in every dtype and block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tests.ascend.kernel_case import Call, KernelCase, Place
from tests.ascend.pooled_lookup_cases import ABOUT_A_BLOCK

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cases() -> list[KernelCase]:
    """Every dtype in one block, float32 in blocks from 1 to 1,024 columns."""
    forms = [(dtype, 64) for dtype in _DTYPES] + [("fp32", block) for block in (1, 4, 256, 1024)]
    return [_case(dtype, block) for dtype, block in forms]


def _case(dtype: str, block: int) -> KernelCase:
    signature = {
        "rows_ptr": "*i64", "offsets_ptr": "*i64", "gradients_ptr": "*fp32", "first_columns_ptr": "*i32",
        "weights_ptr": f"*{dtype}", "table_starts_ptr": "*i64", "scale_gradients_ptr": "*fp32",
        "num_bags": "i32", "batch_size": "i32", "num_columns": "i32",
    }  # fmt: skip
    dims = sorted({block, max(1, block * 3 // 4), max(1, block // 2 + 1)}, reverse=True)
    calls = {
        "several tables": partial(_call, dtype=dtype, dims=dims, batch_size=9),
        "empty bags": partial(_call, dtype=dtype, dims=dims, batch_size=3, longest=0),
        "bags of about a block": partial(
            _call, dtype=dtype, dims=dims[:2], batch_size=len(ABOUT_A_BLOCK), lengths=ABOUT_A_BLOCK
        ),
        "gradients that are no numbers": partial(_call, dtype=dtype, dims=dims, batch_size=9, not_finite=True),
    }
    kernel = "recfx.kernels.lookup.per_sample_weights_triton:recfx_per_sample_weight_gradients"
    return KernelCase(
        f"per_sample_weight_gradients-{dtype}-block_{block}", kernel, signature, {"BLOCK_D": block}, calls, programs=3
    )


def _call(
    place: Place, dtype: str, dims: list[int], batch_size: int, longest: int = 6, not_finite: bool = False,
    lengths: Sequence[int] = (),
) -> Call:  # fmt: skip
    draw = torch.Generator().manual_seed(sum(dims))
    tables = [torch.randn(11, dim, generator=draw).to(_DTYPES[dtype]) for dim in dims]
    drawn = torch.randint(0, longest + 1, (len(dims) * batch_size,), generator=draw)
    of_bags = torch.tensor(lengths).repeat(len(dims)) if lengths else drawn
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), of_bags.cumsum(0)])
    rows = torch.randint(-1, 11, (int(offsets[-1]),), generator=draw)
    columns = torch.tensor([0, *dims]).cumsum(0)
    gradients = torch.randn(batch_size, sum(dims), generator=draw)
    if not_finite:
        gradients[::2, columns[:-1]], gradients[1::2, columns[:-1]] = torch.nan, torch.inf  # of each feature
    expected = torch.zeros(rows.numel())
    for bag, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        feature, sample = divmod(bag, batch_size)
        gradient = gradients[sample, columns[feature] : columns[feature + 1]]
        for position in range(begin, end):
            if rows[position] >= 0:
                expected[position] = (gradient * tables[feature][rows[position]].float()).sum()
    placed = [place(table) for table in tables]
    starts = [(table.data_ptr() - placed[0].data_ptr()) // table.element_size() for table in placed]
    arguments = [
        place(rows), place(offsets), place(gradients), place(columns.to(torch.int32)), placed[0],
        place(torch.tensor(starts)), place(torch.full_like(expected, 7.0)),
        len(dims) * batch_size, batch_size, sum(dims),
    ]  # fmt: skip
    return Call(arguments, {"scale_gradients_ptr": expected}, rtol=1e-4, atol=1e-5, keep=tuple(placed))
