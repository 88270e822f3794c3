"""The lookup that does not pool, in every compiled form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from recfx.kernels.lookup import pooled_lookup_reference
from tests.ascend.kernel_case import Call, KernelCase, Place

_KERNEL = "recfx.kernels.lookup.gather_rows_triton:recfx_gather_rows"
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cases() -> list[KernelCase]:
    """Every dtype, and every block of columns up to that of 1,024."""
    forms = [(dtype, 64) for dtype in _DTYPES] + [("fp32", block) for block in (1, 4, 16, 128, 256, 1024)]
    return [_case(dtype, block) for dtype, block in forms]


def _case(dtype: str, block: int) -> KernelCase:
    signature = {
        "rows_ptr": "*i64", "borders_ptr": "*i64", "weights_ptr": f"*{dtype}", "table_starts_ptr": "*i64",
        "gathered_ptr": "*fp32", **{f"gathered_{number}_ptr": "*fp32" for number in range(1, 8)},
        "num_positions": "i32", "num_features": "i32", "dim": "i32",
    }  # fmt: skip
    make = partial(_call, dtype=dtype)
    calls = {
        "several features": partial(make, dim=block, lengths=(9, 0, 17, 1, 0, 40)),
        "a row narrower than the block": partial(make, dim=block // 2 + 1, lengths=(7, 8, 15, 16)),
        "fewer ids than programs": partial(make, dim=block, lengths=(0, 2, 1, 0)),
        "many ids": partial(make, dim=max(1, block * 3 // 4), lengths=(333, 0, 100)),
        "no ids": partial(make, dim=block, lengths=(0, 0)),
        "absent rows": partial(make, dim=block, lengths=(20, 3), absent=True),
    }
    name = f"gather_rows-{dtype}-block_{block}"
    programs = 3 if block in (16, 64) else 40  # blocks of eight rows are filled where programs are few
    return KernelCase(name, _KERNEL, signature, {"BLOCK_D": block}, calls, programs)


def _call(place: Place, dtype: str, dim: int, lengths: Sequence[int], absent: bool = False) -> Call:
    """Rows at both ends of every table, absent ones among them; two features share a table; tables lie apart."""
    draw = torch.Generator().manual_seed(dim + sum(lengths))
    tables = [torch.randn(11, dim, generator=draw).to(_DTYPES[dtype]) for _ in lengths[1:]]
    table_of_feature = [*range(len(tables)), 0]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.randint(-1, 11, (sum(lengths),), generator=draw)
    rows[:1], rows[-1:] = 0, 10
    if absent:
        rows = torch.full_like(rows, -1)
    gathered = pooled_lookup_reference.gather_rows(rows, borders, tables, table_of_feature)
    placed = [place(table) for table in tables]
    starts = [
        (placed[table].data_ptr() - placed[0].data_ptr()) // placed[0].element_size() for table in table_of_feature
    ]
    written = place(torch.full_like(gathered, 7.0))
    arguments = [
        place(rows), place(borders), placed[0], place(torch.tensor(starts)), *[written] * 8,
        rows.numel(), len(lengths), dim,
    ]  # fmt: skip
    return Call([*arguments], {"gathered_ptr": gathered}, keep=tuple(placed))
