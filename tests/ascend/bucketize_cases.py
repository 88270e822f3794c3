"""Ids routed to pieces: with and without index, not cut, empty pieces, repeats, the extremes, ids out of range."""

from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch

from recfx.kernels.index.mix64 import mix64_integer
from recfx.kernels.route.bucketize import WHOLE, Routes
from tests.ascend.kernel_case import Call, KernelCase, Place, offsets_of
from tests.kernels.routes import by_reference

_PROGRAMS = 7
_BAGS = 16  # of a program on a GPU
_COUNTS = {
    "ids_ptr": "*i64", "offsets_ptr": "*i64", "routes_ptr": "*i64", "borders_ptr": "*i64", "pieces_ptr": "*i32",
    "counts_ptr": "*i32", "outside_ptr": "*i64", "num_bags": "i32", "batch_size": "i32", "num_ids": "i32",
    "most_pieces": "i32",
}  # fmt: skip
_SCATTER = {
    "ids_ptr": "*i64", "weights_ptr": "*fp32", "offsets_ptr": "*i64", "pieces_ptr": "*i32", "routes_ptr": "*i64",
    "borders_ptr": "*i64", "sources_ptr": "*i32", "entry_pieces_ptr": "*i32", "new_offsets_ptr": "*i64",
    "new_ids_ptr": "*i64", "new_weights_ptr": "*fp32", "num_bags": "i32", "batch_size": "i32",
}  # fmt: skip
_EXTREMES = (0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**33, 2**63 - 1, -(2**63))


def cases() -> list[KernelCase]:
    """Counts in blocks of pieces up to 1,024; copies with and without weights."""
    blocks = [_counts(block) for block in (1, 4, 8, 64, 1024)]
    scattered = [_scatter(weighted, dtype) for weighted, dtype in ((0, "fp32"), (1, "fp32"), (1, "fp16"))]
    return [*blocks, *scattered, *(_on_gpu(case) for case in (_counts(1), _counts(64), *scattered[:2]))]


def _on_gpu(case: KernelCase) -> KernelCase:
    """The form for GPUs, whose programs take bags that lie side by side."""
    constants: dict[str, Any] = {name: value for name, value in case.constexprs.items() if name != "BLOCK_W"}
    calls = case.calls
    if "BLOCK_W" in case.constexprs:
        calls = {label: partial(make, bags_each=_BAGS) for label, make in case.calls.items()}  # type: ignore[call-arg]
    return replace(
        case, name=f"{case.name}-on_gpu", kernel=f"{case.kernel}_on_gpu", calls=calls, on_gpu=True,
        constexprs={**constants, "BAGS": _BAGS}, programs=_PROGRAMS if "BLOCK_W" in case.constexprs else 40,
    )  # fmt: skip


def _counts(block: int) -> KernelCase:
    most = (block, max(1, block // 2 + 1), 1)
    calls = {
        "several features": partial(_count_call, pieces=most, batch_size=5),
        "one bag": partial(_count_call, pieces=(block,), batch_size=1, longest=200),
        "empty bags": partial(_count_call, pieces=most, batch_size=3, longest=0),
        "no bags": partial(_count_call, pieces=most, batch_size=0),
        "ids out of range": partial(_count_call, pieces=most, batch_size=5, outside=True),
    }
    kernel = "recfx.kernels.route.bucketize_triton:recfx_bucket_counts"
    return KernelCase(f"bucket_counts-block_{block}", kernel, _COUNTS, {"BLOCK_W": block}, calls, programs=_PROGRAMS)


def _scatter(weighted: int, dtype: str) -> KernelCase:
    make = partial(_scatter_call, weighted=bool(weighted), dtype={"fp32": torch.float32, "fp16": torch.float16}[dtype])
    calls = {
        "several features": partial(make, pieces=(4, 3, 1), batch_size=5),
        "many pieces": partial(make, pieces=(130,), batch_size=2, longest=60),
        "empty bags": partial(make, pieces=(2, 2), batch_size=3, longest=0),
        "no bags": partial(make, pieces=(2,), batch_size=0),
    }
    signature = _SCATTER | {"weights_ptr": f"*{dtype}", "new_weights_ptr": f"*{dtype}"}
    name = "-".join(["bucket_scatter", *["weighted"] * weighted, dtype])
    kernel = "recfx.kernels.route.bucketize_triton:recfx_bucket_scatter"
    return KernelCase(name, kernel, signature, {"WEIGHTED": bool(weighted)}, calls, programs=_PROGRAMS)


def _batch(
    pieces: tuple[int, ...], batch_size: int, longest: int, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, Routes]:
    """For each number of pieces a feature of rows and one with an index, and one that is not cut."""
    routes = Routes([], [], [], [], [], [], [])
    ids, lengths = [], []
    for number, kind in [*((number, kind) for number in pieces for kind in ("rows", "indexed")), (0, "indexed")]:
        rows = 90
        inner = torch.randint(0, rows + 1, (max(0, number - 1),), generator=draw).sort().values.tolist()
        routes.row_borders.append([0, *inner, rows] if number else [])
        routes.rows.append(rows)
        routes.dense_rows.append(11 if kind == "indexed" else 0)
        routes.buckets.append(6 if kind == "indexed" else 0)
        routes.seeds.append((0, 7, -(2**63))[len(ids) % 3])
        own = torch.randint(0, longest + 1, (batch_size,), generator=draw)
        asked = torch.randint(0, rows, (max(1, int(own.sum())),), generator=draw)
        if kind == "indexed":
            wild = torch.randint(-(2**62), 2**62, asked.shape, generator=draw)
            asked = torch.where(torch.rand(asked.shape, generator=draw) < 0.5, asked, wild)
            asked[: len(_EXTREMES)] = torch.tensor(_EXTREMES)[: asked.numel()]
        lengths.append(own)
        ids.append(asked[: int(own.sum())])
    for feature, borders in enumerate(routes.row_borders):
        for piece in [*range(len(borders) - 1), WHOLE, *([0] if borders else [])]:
            routes.sources.append(feature)
            routes.pieces.append(piece)
    return torch.cat(ids), torch.cat(lengths), routes


def _route_fields(routes: Routes) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernels read them: the routes, and all borders."""
    starts = [0, *accumulate(map(len, routes.row_borders))]
    fields = [
        [start, max(0, len(borders) - 1), dense, rows, buckets, mix64_integer(seed) if seed else 0]
        for start, borders, dense, rows, buckets, seed in zip(starts[:-1], *routes[:5], strict=True)
    ]
    return torch.tensor(fields), torch.tensor(list(chain.from_iterable(routes.row_borders)), dtype=torch.int64)


def _pieces(ids: torch.Tensor, lengths: torch.Tensor, batch_size: int, routes: Routes) -> torch.Tensor:
    """Where the reference sends each id, from weights that are positions."""
    pieces = torch.zeros(ids.numel(), dtype=torch.int32)
    positions = torch.arange(ids.numel(), dtype=torch.float64)
    _, new_lengths, new_positions = by_reference(ids, lengths, batch_size, routes, positions)
    assert new_positions is not None
    of_entry = new_positions.long().split(new_lengths.view(len(routes.sources), batch_size).sum(1).tolist())
    for piece, own in zip(routes.pieces, of_entry, strict=True):
        if piece > 0:
            pieces[own] = piece
    return pieces


def _count_call(
    place: Place, pieces: tuple[int, ...], batch_size: int, longest: int = 9, outside: bool = False, bags_each: int = 0
) -> Call:
    draw = torch.Generator().manual_seed(sum(pieces) + batch_size)
    ids, lengths, routes = _batch(pieces, batch_size, longest, draw)
    piece_of_ids = _pieces(ids, lengths, batch_size, routes)
    offsets, first = offsets_of(lengths), torch.full((_PROGRAMS,), ids.numel())
    most = max(pieces)
    bags = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    if outside:  # every third id of each feature whose ids are rows
        for bag in range(lengths.numel()):
            program = bag // bags_each if bags_each else bag % _PROGRAMS
            is_rows = routes.buckets[bag // batch_size] == 0
            for position in range(int(offsets[bag]), int(offsets[bag + 1])):
                if is_rows and position % 3 == 0:
                    ids[position] = (-1, 90, 2**63 - 1, -(2**63))[position % 4]
                    piece_of_ids[position] = -1
                    first[program] = min(int(first[program]), position)
    counts = torch.zeros(lengths.numel(), most, dtype=torch.int32)
    counts.index_put_(
        (bags[piece_of_ids >= 0], piece_of_ids[piece_of_ids >= 0].long()),
        torch.ones((), dtype=torch.int32),
        accumulate=True,
    )
    fields, borders = _route_fields(routes)
    arguments = [
        place(ids), place(offsets), place(fields), place(borders), place(torch.full_like(piece_of_ids, 77)),
        place(torch.full_like(counts, 0 if bags_each else 77)), place(torch.full_like(first, 77)),
        lengths.numel(), batch_size, ids.numel(), most,
    ]  # fmt: skip
    return Call(arguments, {"pieces_ptr": piece_of_ids, "counts_ptr": counts, "outside_ptr": first})


def _scatter_call(
    place: Place, weighted: bool, dtype: torch.dtype, pieces: tuple[int, ...], batch_size: int, longest: int = 9
) -> Call:
    draw = torch.Generator().manual_seed(sum(pieces) + batch_size)
    ids, lengths, routes = _batch(pieces, batch_size, longest, draw)
    weights = torch.rand(ids.numel() if weighted else 0, generator=draw).to(dtype)
    new_ids, new_lengths, new_weights = by_reference(ids, lengths, batch_size, routes, weights if weighted else None)
    fields, borders = _route_fields(routes)
    expected = {"new_ids_ptr": new_ids} | ({} if new_weights is None else {"new_weights_ptr": new_weights})
    arguments = [
        place(ids), place(weights), place(offsets_of(lengths)), place(_pieces(ids, lengths, batch_size, routes)),
        place(fields), place(borders), place(torch.tensor(routes.sources, dtype=torch.int32)),
        place(torch.tensor(routes.pieces, dtype=torch.int32)), place(offsets_of(new_lengths)),
        place(torch.full_like(new_ids, 77)),
        place(torch.full((new_ids.numel() if weighted else 0,), 77, dtype=dtype)),
        new_lengths.numel(), batch_size,
    ]  # fmt: skip
    return Call(arguments, expected)
