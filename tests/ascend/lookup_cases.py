"""The lookups, pooled, unpooled and of quantized rows, and the gradient of the weights of ids, in every form."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from recfx.kernels.build.tiling import ASCEND_910B, lookup_rows
from recfx.kernels.lookup import pooled_lookup_reference
from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients_reference
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_reference
from recfx.kernels.lookup.quantized_rows import quantize_rows
from tests.ascend.kernel_case import DTYPES, Call, KernelCase, Place, from_first, offsets_of

_KERNELS = "recfx.kernels.lookup."
ABOUT_A_BLOCK = (8, 8, 7, 1, 7, 1, 0, 16, 15, 1, 9, 17, 6, 0, 0, 1, 2, 3, 8, 4, 5, 10, 11, 0, 12, 8, 13, 14, 5, 0)
"""Lengths of bags: some end where a block of 8, 16 or 32 rows does, or a row before or after; all fill six of 32."""
_OF_BAGS = {"num_bags": "i32", "batch_size": "i32", "num_columns": "i32"}


def cases() -> list[KernelCase]:
    """Every block of columns up to that of 1,024; of the pooled ones, also fewer rows at once than fit, faster
    on some devices.
    """
    pooling = ((0, 0), (1, 0), (0, 1), (1, 1))
    pooled = [(dtype, 64, *pool) for dtype in DTYPES for pool in pooling[:3]]
    pooled += [("fp32", block, 1, 0) for block in (1, 4, 16, 128, 256, 1024)]
    gathered = [(dtype, 64) for dtype in DTYPES] + [("fp32", block) for block in (1, 4, 16, 128, 256, 1024)]
    quantized = [(bits, 64, *pool, "fp32") for bits in (8, 4) for pool in pooling]
    quantized += [(bits, block, 1, 0, "fp32") for bits in (8, 4) for block in (2, 4, 16, 128, 256, 1024)]
    quantized += [(8, 1, 1, 0, "fp32"), (8, 64, 1, 0, "fp16"), (4, 64, 1, 0, "fp16")]
    return [
        *(_pooled(dtype, block, bool(weighted), bool(mean)) for dtype, block, weighted, mean in pooled),
        _pooled("fp32", 64, True, False, 8),
        *(_gathered(*form) for form in gathered),
        *(_quantized(bits, block, bool(weighted), bool(mean), out) for bits, block, weighted, mean, out in quantized),
        _quantized(8, 64, True, False, "fp32", 16),
    ]


def gradient_cases() -> list[KernelCase]:
    """Every dtype in one block, float32 in blocks from 1 to 1,024 columns."""
    forms = [(dtype, 64) for dtype in DTYPES] + [("fp32", block) for block in (1, 4, 256, 1024)]
    return [_gradients(dtype, block) for dtype, block in forms]


def gpu_cases() -> list[KernelCase]:
    """The forms for GPUs: a bag or several in a tile, every dtype, and tables whose rows are whole words."""
    pooled = [
        (dtype, 64, bags, weighted, False) for dtype, bags, weighted in zip(DTYPES, (2, 4, 1), (0, 1, 1), strict=True)
    ]
    pooled += [("fp32", 1, 16, True, False), ("fp32", 16, 8, False, True), ("fp32", 256, 1, True, False)]
    quantized = [(8, 64, 4, True, False, "fp32"), (4, 64, 1, False, True, "fp32"), (8, 16, 16, True, False, "fp16")]
    return [
        *(_on_gpu(_pooled(dtype, block, bool(weighted), mean), bags) for dtype, block, bags, weighted, mean in pooled),
        *(_on_gpu(_gathered(dtype, block), bags) for dtype, block, bags in (("fp32", 64, 2), ("fp16", 1, 16))),
        *(
            _on_gpu(_quantized(bits, block, weighted, mean, out), bags)
            for bits, block, bags, weighted, mean, out in quantized
        ),
        *(_on_gpu(_gradients(dtype, block), bags) for dtype, block, bags in (("fp32", 64, 2), ("fp16", 1, 16))),
        *(_on_gpu(_gradients(dtype, block), bags) for dtype, block, bags in (("bf16", 64, 4), ("fp32", 256, 1))),
    ]


def _on_gpu(case: KernelCase, bags: int) -> KernelCase:
    """The form for GPUs of a case; it has one output, and a tile in the place of rows in flight."""
    function, left_out = case.kernel.partition(":")[2], {"ROWS"}
    left_out |= {name for name in case.signature if name.startswith(("pooled_", "gathered_")) and name[-5].isdigit()}
    renamed = {"bytes_ptr": ("words_ptr", "*i32"), "row_bytes_ptr": ("row_words_ptr", "*i32")}
    signature = dict(renamed.get(name, (name, kind)) for name, kind in case.signature.items() if name not in left_out)
    constexprs = {name: value for name, value in case.constexprs.items() if name not in left_out} | {"BAGS": bags}

    def call(make: Any, place: Place) -> Call:
        made = make(place)
        named = dict(zip(case.signature, made.arguments, strict=True))
        if "bytes_ptr" in named:
            named["bytes_ptr"] = named["bytes_ptr"].view(torch.int32)
            named |= {name: named[name] // 4 for name in ("table_starts_ptr", "row_bytes_ptr")}
        return replace(made, arguments=[value for name, value in named.items() if name not in left_out])

    calls = {label: partial(call, make) for label, make in case.calls.items()}
    if "BITS" in constexprs:
        calls = {label: partial(call, partial(make, alignments=(4, 16, 8))) for label, make in case.calls.items()}
    return KernelCase(
        f"{case.name}-on_gpu-bags_{bags}", f"{_KERNELS}lookup_gpu_triton:{function}_on_gpu", signature, constexprs,
        calls, programs=-(-(433 if "gathered_ptr" in signature else 90) // bags), on_gpu=True,
    )  # fmt: skip


class _Batch:
    """Rows at both ends of every table, absent rows, and empty bags, from a generator that depends on the sizes."""

    def __init__(self, dims: Sequence[int], batch_size: int, longest: int = 6, lengths: Sequence[int] = ()) -> None:
        self.draw = torch.Generator().manual_seed(sum(dims) + batch_size)
        self.dims, self.batch_size, self._longest, self._lengths = dims, batch_size, longest, lengths

    def rows_of(self, table_rows: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows, and the offsets of bags."""
        size = (len(self.dims) * self.batch_size,)
        drawn = torch.randint(0, self._longest + 1, size, generator=self.draw)
        offsets = offsets_of(torch.tensor(self._lengths).repeat(len(self.dims)) if self._lengths else drawn)
        rows = torch.randint(-1, table_rows, (int(offsets[-1]),), generator=self.draw)
        if table_rows:
            rows[:1], rows[-1:] = 0, table_rows - 1
        return rows, offsets

    @property
    def columns(self) -> torch.Tensor:
        return torch.tensor([0, *self.dims]).cumsum(0)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of ``_OF_BAGS``."""
        return len(self.dims) * self.batch_size, self.batch_size, sum(self.dims)


def _calls_of_bags(make: Any, dims: list[int], block: int) -> dict[str, Any]:
    return {
        "several tables": partial(make, dims=dims, batch_size=9),
        "one bag": partial(make, dims=[block], batch_size=1),
        "empty bags": partial(make, dims=dims, batch_size=3, longest=0),
        "no bags": partial(make, dims=dims, batch_size=0),
        "long bags": partial(make, dims=[block], batch_size=2, longest=100),
        "bags of about a block": partial(make, dims=dims[:2], batch_size=len(ABOUT_A_BLOCK), lengths=ABOUT_A_BLOCK),
    }


def _programs(weighted: bool, mean: bool) -> int:
    """Bags share blocks where there are several in a program."""
    return 1 if mean else 3 if weighted else 40


def _dims(block: int, *more: int) -> list[int]:
    return sorted({block, max(1, block * 3 // 4), max(1, block // 2 + 1), *more}, reverse=True)


def _name(kernel: str, *parts: str, rows: int | None = None, **flags: bool) -> str:
    return "-".join([kernel, *parts, *(flag for flag, is_set in flags.items() if is_set)]) + f"-rows_{rows}" * bool(
        rows
    )


def _pooled(dtype: str, block: int, weighted: bool, mean: bool, rows: int | None = None) -> KernelCase:
    signature = {
        "rows_ptr": "*i64", "offsets_ptr": "*i64", "scales_ptr": "*fp32", "weights_ptr": f"*{dtype}",
        "table_starts_ptr": "*i64", "first_columns_ptr": "*i32",
        **dict.fromkeys(("pooled_ptr", "pooled_0_ptr", "pooled_1_ptr"), "*fp32"), **_OF_BAGS,
    }  # fmt: skip
    make = partial(_pooled_call, dtype=dtype, weighted=weighted, mean=mean)
    calls = _calls_of_bags(make, _dims(block), block)
    if weighted:
        calls["absent rows whose weights are no numbers"] = partial(
            make, dims=_dims(block), batch_size=9, not_finite=True
        )
    constexprs = {"BLOCK_D": block, "ROWS": lookup_rows(block, ASCEND_910B, rows), "WEIGHTED": weighted, "MEAN": mean}
    kernel = _KERNELS + "pooled_lookup_triton:recfx_pooled_lookup"
    name = _name("pooled_lookup", dtype, f"block_{block}", rows=rows, weighted=weighted, mean=mean)
    return KernelCase(name, kernel, signature, constexprs, calls, _programs(weighted, mean), rows is not None)


def _pooled_call(place: Place, dtype: str, weighted: bool, mean: bool, not_finite: bool = False, **sizes: Any) -> Call:
    batch = _Batch(**sizes)
    tables = [torch.randn(11, dim, generator=batch.draw).to(DTYPES[dtype]) for dim in batch.dims]
    rows, offsets = batch.rows_of()
    scales = torch.rand(rows.numel(), generator=batch.draw) if weighted else None
    if scales is not None and not_finite:
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(rows.numel())
        scales[rows < 0] = bad[: int((rows < 0).sum())]
    pooled = pooled_lookup_reference.pooled_lookup(rows, offsets, tables, list(range(len(tables))), mean, scales)
    placed = [place(table) for table in tables]
    arguments = [
        place(rows), place(offsets), place(torch.empty(0) if scales is None else scales), placed[0],
        place(from_first(placed)), place(batch.columns.to(torch.int32)), *[place(torch.full_like(pooled, 7.0))] * 3,
        *batch.sizes,
    ]  # fmt: skip
    return Call(arguments, {"pooled_ptr": pooled}, keep=tuple(placed))  # the kernel reaches them from the first


def _gathered(dtype: str, block: int) -> KernelCase:
    signature = {
        "rows_ptr": "*i64", "borders_ptr": "*i64", "weights_ptr": f"*{dtype}", "table_starts_ptr": "*i64",
        "gathered_ptr": "*fp32", **{f"gathered_{number}_ptr": "*fp32" for number in range(1, 8)},
        "num_positions": "i32", "num_features": "i32", "dim": "i32",
    }  # fmt: skip
    make = partial(_gathered_call, dtype=dtype)
    calls = {
        "several features": partial(make, dim=block, lengths=(9, 0, 17, 1, 0, 40)),
        "a row narrower than the block": partial(make, dim=block // 2 + 1, lengths=(7, 8, 15, 16)),
        "fewer ids than programs": partial(make, dim=block, lengths=(0, 2, 1, 0)),
        "many ids": partial(make, dim=max(1, block * 3 // 4), lengths=(333, 0, 100)),
        "no ids": partial(make, dim=block, lengths=(0, 0)),
        "absent rows": partial(make, dim=block, lengths=(20, 3), absent=True),
    }
    programs = 3 if block in (16, 64) else 40  # blocks of eight rows are filled where programs are few
    kernel = _KERNELS + "gather_rows_triton:recfx_gather_rows"
    return KernelCase(f"gather_rows-{dtype}-block_{block}", kernel, signature, {"BLOCK_D": block}, calls, programs)


def _gathered_call(place: Place, dtype: str, dim: int, lengths: Sequence[int], absent: bool = False) -> Call:
    """Two features share a table; tables lie apart."""
    draw = torch.Generator().manual_seed(dim + sum(lengths))
    tables = [torch.randn(11, dim, generator=draw).to(DTYPES[dtype]) for _ in lengths[1:]]
    table_of_feature, borders = [*range(len(tables)), 0], offsets_of(torch.tensor(lengths))
    rows = torch.randint(-1, 11, (sum(lengths),), generator=draw)
    rows[:1], rows[-1:] = 0, 10
    if absent:
        rows = torch.full_like(rows, -1)
    gathered = pooled_lookup_reference.gather_rows(rows, borders, tables, table_of_feature)
    placed = [place(table) for table in tables]
    arguments = [
        place(rows), place(borders), placed[0], place(from_first(placed)[table_of_feature]),
        *[place(torch.full_like(gathered, 7.0))] * 8, rows.numel(), len(lengths), dim,
    ]  # fmt: skip
    return Call(arguments, {"gathered_ptr": gathered}, keep=tuple(placed))


def _quantized(bits: int, block: int, weighted: bool, mean: bool, out: str, rows: int | None = None) -> KernelCase:
    signature = {
        "rows_ptr": "*i64", "offsets_ptr": "*i64", "scales_ptr": "*fp32", "bytes_ptr": "*i8",
        "table_starts_ptr": "*i64", "row_bytes_ptr": "*i32", "first_columns_ptr": "*i32",
        **dict.fromkeys(("pooled_ptr", "pooled_0_ptr", "pooled_1_ptr"), f"*{out}"), **_OF_BAGS,
    }  # fmt: skip
    make = partial(_quantized_call, bits=bits, weighted=weighted, mean=mean, out=DTYPES[out])
    calls = _calls_of_bags(make, _dims(block, max(1, block - 1)), block)
    calls["long bags"] = partial(make, dims=[max(1, block - 1)], batch_size=2, longest=100)
    calls["absent rows of an empty table"] = partial(make, dims=[block], batch_size=3, table_rows=0)
    constexprs = {"BLOCK_D": block, "ROWS": lookup_rows(block, ASCEND_910B, rows), "BITS": bits}
    constexprs |= {"WEIGHTED": weighted, "MEAN": mean}
    parts = [f"int{bits}", f"block_{block}", *["weighted"] * weighted, *["mean"] * mean, out]
    kernel = _KERNELS + "quantized_lookup_triton:recfx_quantized_lookup"
    name, programs = _name("quantized_lookup", *parts, rows=rows), _programs(weighted, mean)
    return KernelCase(name, kernel, signature, constexprs, calls, programs, rows is not None)


def _quantized_call(
    place: Place, bits: int, weighted: bool, mean: bool, out: torch.dtype, table_rows: int = 11,
    alignments: Sequence[int] = (1, 16, 2), **sizes: Any,
) -> Call:  # fmt: skip
    """Rows of several alignments; codes of all values, and padding of any content."""
    batch = _Batch(**sizes)
    dims = list(batch.dims)
    tables = [
        quantize_rows(torch.randn(table_rows, dim, generator=batch.draw), bits, alignments[number % 3])
        for number, dim in enumerate(dims)
    ]
    for number, (table, dim) in enumerate(zip(tables, dims, strict=True)):
        table[:, 4:].random_(256, generator=batch.draw)
        table[:1, 4 : 4 + dim] = 255 if number % 2 else 0
    rows, offsets = batch.rows_of(table_rows)
    scales = torch.randn(rows.numel(), generator=batch.draw) if weighted else None
    how = (bits, list(range(len(dims))), mean, scales)
    pooled = quantized_lookup_reference(rows, offsets, tables, dims, *how).to(out)
    placed = [place(table) for table in tables]
    row_bytes = torch.tensor([table.size(1) for table in tables], dtype=torch.int32)
    arguments = [
        place(rows), place(offsets), place(torch.empty(0) if scales is None else scales),
        placed[0].view(-1).view(torch.int8), place(from_first(placed)), place(row_bytes),
        place(batch.columns.to(torch.int32)), *[place(torch.full_like(pooled, 7.0))] * 3, *batch.sizes,
    ]  # fmt: skip
    return Call(arguments, {"pooled_ptr": pooled}, keep=tuple(placed))


def _gradients(dtype: str, block: int) -> KernelCase:
    signature = {
        "rows_ptr": "*i64", "offsets_ptr": "*i64", "gradients_ptr": "*fp32", "first_columns_ptr": "*i32",
        "weights_ptr": f"*{dtype}", "table_starts_ptr": "*i64", "scale_gradients_ptr": "*fp32", **_OF_BAGS,
    }  # fmt: skip
    make = partial(_gradients_call, dtype=dtype)
    calls = _calls_of_bags(make, _dims(block), block)
    calls = {label: calls[label] for label in ("several tables", "empty bags", "bags of about a block")}
    calls["gradients that are no numbers"] = partial(make, dims=_dims(block), batch_size=9, not_finite=True)
    kernel = _KERNELS + "per_sample_weights_triton:recfx_per_sample_weight_gradients"
    name = f"per_sample_weight_gradients-{dtype}-block_{block}"
    return KernelCase(name, kernel, signature, {"BLOCK_D": block}, calls, programs=3)


def _gradients_call(place: Place, dtype: str, not_finite: bool = False, **sizes: Any) -> Call:
    batch = _Batch(**sizes)
    tables = [torch.randn(11, dim, generator=batch.draw).to(DTYPES[dtype]) for dim in batch.dims]
    rows, offsets = batch.rows_of()
    gradients = torch.randn(batch.batch_size, sum(batch.dims), generator=batch.draw)
    if not_finite:  # in the first column of each feature
        gradients[::2, batch.columns[:-1]], gradients[1::2, batch.columns[:-1]] = torch.nan, torch.inf
    expected = per_sample_weight_gradients_reference(rows, offsets, gradients, tables, list(range(len(tables))))
    placed = [place(table) for table in tables]
    arguments = [
        place(rows), place(offsets), place(gradients), place(batch.columns.to(torch.int32)), placed[0],
        place(from_first(placed)), place(torch.full_like(expected, 7.0)), *batch.sizes,
    ]  # fmt: skip
    return Call(arguments, {"scale_gradients_ptr": expected}, rtol=1e-4, atol=1e-5, keep=tuple(placed))
