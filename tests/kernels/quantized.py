"""Lookups of quantized rows."""

from typing import Any

import torch
from hypothesis import strategies as st

from recfx.kernels.lookup.quantized_rows import quantize_rows


@st.composite
def lookups(draw: st.DrawFn, bits: int, multiple: int) -> tuple[Any, ...]:
    """Features that share a table, empty bags, absent rows, and padding.

    Args:
        draw: of hypothesis.
        bits: per code.
        multiple: of which dims are multiples.

    Returns:
        The arguments of ``quantized_lookup``, and the row alignment.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dims = [multiple * draw(st.sampled_from([1, 2, 3, 7, 16, 33, 64, 512])) for _ in range(draw(st.integers(1, 3)))]
    alignment = draw(st.sampled_from([1, 1, 2, 4, 16]))
    tables = [
        quantize_rows(torch.randn(draw(st.integers(1, 20)), dim, generator=generator), bits, alignment) for dim in dims
    ]
    table_of_feature = [0] * draw(st.integers(0, 1)) + list(range(len(dims)))
    batch_size = draw(st.integers(1, 5))
    counts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5, 40]), min_size=1, max_size=10))
    lengths = [counts[bag % len(counts)] for bag in range(batch_size * len(table_of_feature))]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    least = draw(st.sampled_from([0, -1]))
    rows = [
        torch.randint(least, tables[table].size(0), (sum(lengths[first : first + batch_size]),), generator=generator)
        for first, table in zip(range(0, len(lengths), batch_size), table_of_feature, strict=True)
    ]
    ids = torch.cat(rows)
    scales = torch.randn(ids.numel(), generator=generator) if draw(st.booleans()) else None
    return ids, offsets, tables, dims, bits, table_of_feature, scales is None and draw(st.booleans()), scales, alignment
