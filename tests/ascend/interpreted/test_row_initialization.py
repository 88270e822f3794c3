"""The operator that initialises rows of several tables, against the operator on the CPU."""

from __future__ import annotations

import pytest
import torch

from recfx.kernels.step.row_initialization import (
    StateOfRows,
    TableOfRows,
    initialize_rows,
    initialize_rows_of_tables,
)


def tables_of(dtype: torch.dtype) -> list[TableOfRows]:
    """One without states, one with a state per row, and a shard of columns with two states."""
    wide = torch.full((6, 150), 7.0, dtype=dtype)
    one, two = (StateOfRows(torch.full((6, width), 7.0), value) for width, value in ((1, 0.5), (140, 0.25)))
    return [
        TableOfRows(torch.full((5, 3), 7.0, dtype=dtype), 2**63 - 1, -0.1, 0.7, 0, ()),
        TableOfRows(torch.full((6, 16), 7.0, dtype=dtype), -5, 0.1, 0.1, 3, (one,)),
        TableOfRows(wide[:, :140], 0, -3.0, 2.0, 10, (two, StateOfRows(torch.full((6, 140), 7.0), 0.0))),
    ]


ENTRIES = torch.tensor([[4, -(2**63), 0], [0, 5, 2], [3, 2**40, 1], [5, -1, 2], [0, 2**63 - 1, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_writes_the_bits_of_the_operator_on_the_cpu(dtype: torch.dtype) -> None:
    tables, expected = tables_of(dtype), tables_of(dtype)
    initialize_rows_of_tables(ENTRIES, tables)
    for row, id_, number in ENTRIES.tolist():
        table, rows = expected[number], torch.tensor([row])
        ids = torch.tensor([id_])
        initialize_rows(table.weight, rows, ids, table.key, table.low, table.high, table.first_column)
        for state in table.states:
            state.tensor[row] = state.value
    for one, other in zip(tables, expected, strict=True):
        assert torch.equal(one.weight, other.weight)
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(one.states, other.states, strict=True))
