"""New rows: ids at the extremes, tables of several widths, shards of columns, rows with a stride, states or none."""

from functools import partial

import torch

from recfx.kernels.step.row_initialization import TableFacts, init_rows_of_tables_reference_, initialization_key
from tests.ascend.find_rows_cases import EXTREMES
from tests.ascend.kernel_case import DTYPES, Call, KernelCase, Place, from_first

_SIGNATURE = {
    "entries_ptr": "*i64", "tables_ptr": "*i64", "values_ptr": "*fp32", "weights_ptr": "*fp32", "first_ptr": "*fp32",
    "second_ptr": "*fp32", "num_entries": "i32",
}  # fmt: skip
_DIMS = (12, 1, 128, 64, 300)
_STRIDES = (12, 1, 131, 64, 300)
_FIRST_COLUMNS = (0, 5, 128, 0, 2**40)
_FIRST = (12, 0, 1, 64, 300)
"""The columns of the first state; of the second, there are as many as weights, or none."""
_SECOND = (0, 0, 0, 64, 300)
_LOWS, _HIGHS = (-1.0, -0.1, 0.25, 0.1, -3e-5), (1.0, 0.1, 0.25, 0.7, 1e4)
_VALUES = (0.5, 0.0, 0.25, 0.0, 1.0)


def cases() -> list[KernelCase]:
    """In every dtype of tables."""
    calls = {
        "several tables": partial(_call, rows=11),
        "one table": partial(_call, rows=3, tables=1),
        "no rows": partial(_call, rows=0),
    }
    return [
        KernelCase(
            f"initialize_rows-{dtype}",
            "recfx.kernels.step.row_initialization_triton:recfx_initialize_rows",
            _SIGNATURE | {"weights_ptr": f"*{dtype}"},
            {},
            {label: partial(build, dtype=dtype) for label, build in calls.items()},
            programs=3,
        )
        for dtype in DTYPES
    ]


def _call(place: Place, rows: int, dtype: str, tables: int = len(_DIMS)) -> Call:
    draw = torch.Generator().manual_seed(rows)
    drawn = [torch.randn(rows + 3, stride, generator=draw).to(DTYPES[dtype]) for stride in _STRIDES[:tables]]
    first, second = ([torch.rand(rows + 3, dim, generator=draw) for dim in dims[:tables]] for dims in (_FIRST, _SECOND))
    entries = []
    for table in range(tables):
        ids = torch.cat([torch.tensor(EXTREMES), torch.randint(-(2**63), 2**63 - 1, (rows + 1,), generator=draw)])
        some = torch.randperm(rows + 3, generator=draw)[:rows]
        entries.append(torch.stack([some, ids[:rows], torch.full((rows,), table)], 1))
    asked = torch.cat(entries)[torch.randperm(tables * rows, generator=draw)].contiguous()
    keys = [initialization_key(f"t{table}", table) for table in range(tables)]
    placed = [[place(tensor) for tensor in tensors] for tensors in (drawn, first, second)]
    starts = [from_first(tensors).tolist() for tensors in placed]
    facts = torch.tensor(
        [
            TableFacts(
                starts[0][table], _STRIDES[table], dim, keys[table], _FIRST_COLUMNS[table],
                starts[1][table], _FIRST[table], starts[2][table], _SECOND[table],
            )
            for table, dim in enumerate(_DIMS[:tables])
        ]
    )  # fmt: skip
    lows, highs = torch.tensor(_LOWS[:tables]), torch.tensor(_HIGHS[:tables])
    begin = torch.tensor(_VALUES[:tables])
    arguments = [
        place(asked), place(facts), place(torch.stack([lows, highs - lows, begin, 2 * begin], 1)),
        *(tensors[0] for tensors in placed), asked.shape[0],
    ]  # fmt: skip
    weights = [tensor[:, :dim] for tensor, dim in zip(drawn, _DIMS, strict=False)]
    init_rows_of_tables_reference_(
        asked, weights, first, second, keys, list(_FIRST_COLUMNS), list(_LOWS), list(_HIGHS),
        list(_VALUES), [2 * value for value in _VALUES],
    )  # fmt: skip
    expected = tuple(zip([*placed[0], *placed[1], *placed[2]], [*drawn, *first, *second], strict=True))
    # Triton's interpreter truncates where bfloat16 is rounded.
    return Call(arguments, {}, rtol=2.0**-7 if dtype == "bf16" else 0.0, also=expected)
