"""Finding ids: tables with and without an index, dense rows, slices of tables, shared rows, id -1, and the extremes."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from recfx.kernels.index.find_rows import ReadIndexes, find_rows_reference
from recfx.kernels.index.mix64 import mix64_integer
from recfx.kernels.index.slot_table import insert_into_slots, slot_count
from tests.ascend.kernel_case import Call, KernelCase, Place

_PROGRAMS = 5
_SIGNATURE = {
    "ids_ptr": "*i64", "table_ends_ptr": "*i64", "slots_ptr": "*i64", "side_rows_ptr": "*i64", "indexes_ptr": "*i64",
    "rows_ptr": "*i64", "absent_ptr": "*i32", "num_ids": "i32", "num_tables": "i32", "ids_per_program": "i32",
}  # fmt: skip
EXTREMES = (0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**33, 2**63 - 1, -(2**63))


@dataclass(frozen=True)
class _Table:
    """A slice of ``rows`` of a table of ``table_rows``, from ``row_begin`` on."""

    rows: int
    dense_rows: int = 0
    share_buckets: int = 0
    seed: int = 0
    row_begin: int = 0
    table_rows: int = 0
    indexed: bool = True
    fill: float = 1.0


_TABLES = (
    _Table(40),
    _Table(30, indexed=False),
    _Table(60, dense_rows=10, share_buckets=4, seed=7),
    _Table(20, dense_rows=30, share_buckets=2, seed=-3, row_begin=25, table_rows=80),
    _Table(3, fill=0.0),
    _Table(500, share_buckets=8),
    _Table(70, dense_rows=6, share_buckets=-4, seed=5),  # ids without a row read the last row of their bucket
)


def cases() -> list[KernelCase]:
    """The kernel has one compiled form."""
    calls = {
        "many ids": partial(_call, most=120),
        "few ids": partial(_call, most=3),
        "no ids": partial(_call, most=0),
        "one table": partial(_call, most=40, tables=_TABLES[:1]),
    }
    kernel = "recfx.kernels.index.find_rows_triton:recfx_find_rows"
    on_host_or_npu = KernelCase("find_rows", kernel, _SIGNATURE, {}, calls, programs=_PROGRAMS)
    kernel = "recfx.kernels.index.find_rows_gpu_triton:recfx_find_rows_on_gpu"
    signature = {name: kind for name, kind in _SIGNATURE.items() if name != "ids_per_program"}
    on_gpu = {label: partial(_on_gpu, make) for label, make in calls.items()}
    return [
        on_host_or_npu,
        *(
            KernelCase(
                f"find_rows-on_gpu-{lanes}", kernel, signature, {"BLOCK": lanes}, on_gpu, 1000 // lanes, on_gpu=True
            )
            for lanes in (16, 64)
        ),
    ]


def _on_gpu(make: partial[Call], place: Place) -> Call:
    """The call of the form for GPUs, whose programs count absent ids together."""
    call = make(place)
    *arguments, counts, ids, tables, _ = call.arguments
    expected = {**call.expected, "absent_ptr": call.expected["absent_ptr"].sum(0, dtype=torch.int32)}
    return replace(call, arguments=[*arguments, counts[0].clone(), ids, tables], expected=expected)


def _call(place: Place, most: int, tables: tuple[_Table, ...] = _TABLES) -> Call:
    draw = torch.Generator().manual_seed(most)
    slots, side_rows, asked = [], [], []
    for table in tables:
        known_ids = torch.cat([torch.tensor(EXTREMES), torch.randint(-(2**62), 2**62, (table.rows,), generator=draw)])
        known_ids = known_ids[(known_ids < 0) | (known_ids >= table.dense_rows)]
        known_ids = known_ids[torch.randperm(known_ids.numel(), generator=draw)][: int(table.rows * table.fill)]
        of_table = torch.full((slot_count(table.rows), 2), -1)
        side_row = torch.full((1,), -1)
        insert_into_slots(known_ids, torch.arange(known_ids.numel()) % table.rows, of_table, side_row)
        slots.append(of_table if table.indexed else torch.empty(0, 2, dtype=torch.int64))
        side_rows.append(side_row)
        absent = torch.randint(-(2**62), 2**62, (5,), generator=draw)
        of_slice = torch.arange(max(table.dense_rows, table.row_begin + table.rows))  # dense ids end within it
        some = torch.cat([known_ids, absent, torch.tensor(EXTREMES), of_slice])
        if not table.indexed:
            some = torch.arange(table.rows)
        asked.append(some[torch.randperm(some.numel(), generator=draw)][:most])
    ids = torch.cat(asked)
    ends = torch.tensor([of_table.numel() for of_table in asked]).cumsum(0)
    rows, absent_ids = _by_reference(ids, ends, tables, slots, side_rows)
    per_program = (-(-ids.numel() // _PROGRAMS) + 7) // 8 * 8
    rows_found, counts = place(torch.full_like(ids, -7)), place(torch.zeros(_PROGRAMS, len(tables), dtype=torch.int32))
    placed, placed_sides = [place(of_table) for of_table in slots], [place(side_row) for side_row in side_rows]
    indexes = place(_indexes(tables, placed, placed_sides))
    arguments = [
        place(ids), place(ends), placed[0], placed_sides[0], indexes, rows_found, counts,
        ids.numel(), len(tables), per_program,
    ]  # fmt: skip
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    absent_by_program = torch.zeros(_PROGRAMS, len(tables), dtype=torch.int32)
    for program in range(_PROGRAMS):
        for table in range(len(tables)):
            first = max(int(borders[table]), program * per_program)
            last = min(int(borders[table + 1]), (program + 1) * per_program)
            if first < last:
                of_table = (tables[table],), [slots[table]], [side_rows[table]]
                _, one = _by_reference(ids[first:last], torch.tensor([last - first]), *of_table)
                absent_by_program[program, table] = one[0]
    assert absent_by_program.sum(0).tolist() == absent_ids.tolist()
    return Call(arguments, {"rows_ptr": rows, "absent_ptr": absent_by_program}, keep=(*placed, *placed_sides))


def _by_reference(
    ids: torch.Tensor, ends: torch.Tensor, tables: tuple[_Table, ...], slots: list[torch.Tensor],
    side_rows: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    all_slots, all_side_rows = torch.cat(slots), torch.cat(side_rows)
    facts = _indexes(tables, list(all_slots.split(list(map(len, slots)))), list(all_side_rows.split(1)))
    return find_rows_reference(ids, ends, ReadIndexes(all_slots, all_side_rows, facts))


def _indexes(tables: tuple[_Table, ...], slots: list[torch.Tensor], side_rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(
        [
            [
                (of_table.data_ptr() - slots[0].data_ptr()) // 8 if table.indexed else 0,
                of_table.shape[0] - 1,
                (side_row.data_ptr() - side_rows[0].data_ptr()) // 8,
                table.row_begin,
                table.rows,
                table.dense_rows,
                table.share_buckets,
                table.table_rows or table.rows,
                mix64_integer(table.seed),
                mix64_integer(table.seed + 1),
            ]
            for table, of_table, side_row in zip(tables, slots, side_rows, strict=True)
        ]
    )
