"""Keys in digits: features with and without positions, rows that are absent, tables that are not stepped, many rows."""

from functools import partial

import torch

from recfx.kernels.step.step_order import step_keys
from tests.ascend.kernel_case import Call, KernelCase, Place, offsets_of

_PROGRAMS = 3
_SIGNATURE = {
    "rows_ptr": "*i64", "offsets_ptr": "*i64", "bases_ptr": "*i64", "low_ptr": "*fp32", "high_ptr": "*fp32",
    "num_positions": "i32", "num_features": "i32", "batch_size": "i32", "per_program": "i32",
}  # fmt: skip
_FEW = ((7, 5), (9, 5), (3, -1), (4, 2**24 - 4))
_MANY = ((2**31 - 1, 2**24 - 9), (5, 2**31), (3, -1), (2**24 + 9, 2**40 + 2**24 - 5), (2**30, 0))
"""Of each feature: the rows of its table, and the key of the first one."""


def cases() -> list[KernelCase]:
    """Digits of float32 in one form; for GPUs, integers of as many bits as the tables need."""
    calls = {
        "several features": partial(_call, batch_size=5, longest=9),
        "many rows": partial(_call, batch_size=5, longest=9, tables=_MANY),
        "long bags": partial(_call, batch_size=2, longest=900),
        "one feature": partial(_call, batch_size=3, longest=9, tables=_MANY[:1]),
        "empty features": partial(_call, batch_size=1, longest=1),
        "most rows absent": partial(_call, batch_size=5, longest=9, absent=0.9),
        "no positions": partial(_call, batch_size=2, longest=0),
    }
    kernel = "recfx.kernels.step.step_order_triton:recfx_step_digits"
    made = [KernelCase("step_digits", kernel, _SIGNATURE, {}, calls, programs=_PROGRAMS)]
    for low, bits, is_wide in ((torch.int16, 15, False), (torch.int32, 31, False), (torch.int32, 31, True)):
        few = {} if is_wide else {"tables": ((7, 5), (9, 5), (3, -1), (4, 2**bits - 9))}
        signature = {**dict(list(_SIGNATURE.items())[:3]), "low_ptr": f"*i{bits + 1}", "high_ptr": "*i8"}
        signature |= {"bags_ptr": "*i32", **dict.fromkeys(("num_positions", "num_features", "batch_size"), "i32")}
        gpu_calls = {label: partial(make, digits=(low, bits, is_wide), **few) for label, make in calls.items()}
        constants = {"BITS": bits, "WIDE": is_wide, "BLOCK": 64}
        name = f"step_digits-on_gpu-{bits}{'-wide' * is_wide}"
        made.append(KernelCase(name, f"{kernel}_on_gpu", signature, constants, gpu_calls, programs=100, on_gpu=True))
    return made


def _call(
    place: Place, batch_size: int, longest: int, tables: tuple[tuple[int, int], ...] = _FEW, absent: float = 0.2,
    digits: tuple[torch.dtype, int, bool] | None = None,
) -> Call:  # fmt: skip
    draw = torch.Generator().manual_seed(longest)
    lengths = torch.randint(0, longest + 1, (len(tables), batch_size), generator=draw)
    rows = []
    for (count, _), of_feature in zip(tables, lengths.sum(1).tolist(), strict=True):
        some = (torch.rand(of_feature, generator=draw, dtype=torch.float64) * count).long()
        some[:2] = torch.tensor([count - 1, 0])[: some.numel()]
        rows.append(torch.where(torch.rand(of_feature, generator=draw) < absent, -1, some))
    asked, offsets = torch.cat(rows), offsets_of(lengths.view(-1))
    bases = [base for _, base in tables]
    keys = step_keys(asked, offsets, bases)
    dtype, bits, is_wide = digits or (torch.float32, 24, True)
    low = torch.where(keys < 0, -1, keys & ((1 << bits) - 1)).to(dtype)
    high = torch.where(keys < 0, 0, keys >> bits).to(torch.int8 if digits else dtype)
    per_program = (-(-asked.numel() // _PROGRAMS) + 15) // 16 * 16
    expected = {"low_ptr": low} | ({"high_ptr": high} if is_wide else {})
    if digits:
        bags = torch.repeat_interleave(torch.arange(lengths.numel(), dtype=torch.int32), lengths.view(-1))
        expected["bags_ptr"] = bags
    arguments = [
        place(asked), place(offsets), place(torch.tensor(bases)), place(torch.full_like(low, -7.0)),
        place(torch.full_like(high, -7.0)), *([place(torch.full_like(bags, -7))] if digits else []),
        asked.numel(), len(tables), batch_size, *[per_program] * (digits is None),
    ]  # fmt: skip
    return Call(arguments, expected)
