"""Batches, and routes of their ids to pieces of tables."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from recfx.kernels.build import library
from recfx.kernels.route.bucketize import Routes, bucketize, bucketize_reference, bucketize_triton

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def by_reference(*batch: Any) -> Routed:
    """``bucketize`` in ATen."""
    with mock.patch.object(library, "operators", return_value=SimpleNamespace(bucketize=bucketize_reference)):
        return bucketize(*batch)


def by_kernels(*batch: Any) -> Routed:
    """``bucketize`` by the kernels in Triton, on whatever device."""
    with mock.patch.object(library, "operators", return_value=SimpleNamespace(bucketize=bucketize_triton)):
        return bucketize(*batch)


INT64 = st.integers(-(2**63), 2**63 - 1)


def cut_equally(rows: int, pieces: int) -> list[int]:
    block = -(-rows // pieces)
    return [min(piece * block, rows) for piece in range(pieces + 1)]


@st.composite
def _borders(draw: st.DrawFn, rows: int) -> list[int]:
    """Few and many pieces, equal and unequal ones, empty ones anywhere."""
    pieces = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 4, 7, 34, 131]))
    if draw(st.booleans()):
        return cut_equally(rows, pieces)
    drawn = draw(st.lists(st.integers(0, rows), min_size=1, max_size=10))
    return [0, *sorted(drawn[piece % len(drawn)] for piece in range(pieces - 1)), rows]


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, Routes, torch.Tensor | None]:
    features, batch_size = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    routes = Routes([], [], [], [], [], [], [])
    ids: list[int] = []
    lengths: list[int] = []
    for _ in range(features):
        kind = draw(st.sampled_from(["static", "indexed", "indexed", "not cut"]))
        rows = draw(st.integers(1, 100))
        dense_rows = draw(st.integers(0, rows - 1)) if kind == "indexed" else 0
        routes.row_borders.append([] if kind == "not cut" else draw(_borders(rows)))
        routes.rows.append(rows)
        routes.dense_rows.append(dense_rows)
        routes.buckets.append(draw(st.integers(1, rows - dense_rows)) if kind == "indexed" else 0)
        routes.seeds.append(draw(st.sampled_from([0, 5, -(2**63)])))
        values = st.integers(0, rows - 1) if kind == "static" else st.one_of(INT64, st.integers(-2, rows))
        own = [draw(st.sampled_from([0, 0, 1, 2, 5, 30])) for _ in range(batch_size)]
        drawn = draw(st.lists(values, min_size=1, max_size=20))
        lengths += own
        ids += [drawn[i * 7 % len(drawn)] for i in range(sum(own))]
    for _ in range(draw(st.integers(0, 8)) if features else 0):
        feature = draw(st.integers(0, features - 1))
        routes.sources.append(feature)
        routes.pieces.append(draw(st.integers(-1, max(-1, len(routes.row_borders[feature]) - 2))))
    if features and draw(st.booleans()):  # everything, as it would be sent
        for feature, own_borders in enumerate(routes.row_borders):
            for piece in range(len(own_borders) - 1):
                routes.sources.append(feature)
                routes.pieces.append(piece)
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    weight_dtype = draw(st.sampled_from([None, torch.float32, torch.float16, torch.float64, torch.bfloat16]))
    weights = None if weight_dtype is None else torch.arange(len(ids)).to(weight_dtype)
    id_tensor = torch.tensor(ids, dtype=torch.int64)
    return id_tensor, torch.tensor(lengths, dtype=dtype), batch_size, routes, weights
