"""``triton/find_rows``: rows of raw ids in the indexes of all tables, in one launch; every id has a row.

Peers: a binary search in sorted ids, table by table, and FBGEMM's ``pruned_hashmap_lookup``, which reads the same
slots.

Bytes: each id, one slot (id and row), and the row.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch

from recfx.kernels.index.find_rows import IndexFacts, ReadIndexes, find_rows
from recfx.kernels.index.mix64 import mix64
from recfx.kernels.index.slot_table import insert_into_slots, slot_count
from tests.bench.harness import Contestant, Result
from tests.bench.setup import DISTRIBUTIONS, Setup
from tests.bench.triton.on_device import FBGEMM, OURS, Workload, has_fbgemm, race, sized

SEARCH = "torch.searchsorted a table"


def run(setup: Setup) -> Iterator[Result]:
    """Both distributions of ids."""
    setup = sized(setup)
    for distribution in DISTRIBUTIONS:
        workload = Workload(setup, distribution)
        ids_of_tables = _held(workload)
        workload.ids = [torch.cat(_of_tables(ids_of_tables, workload.by_table(values))) for values in workload.ids]
        slots = torch.full((setup.tables * slot_count(setup.rows), 2), -1, device=workload.device)
        rows = torch.arange(setup.rows, device=workload.device)
        for ids, of_table in zip(ids_of_tables, slots.chunk(setup.tables), strict=True):
            insert_into_slots(ids, rows, of_table, rows.new_full((1,), -1))
        contestants = [Contestant(OURS, _ours(workload, slots)), Contestant(SEARCH, _search(workload, ids_of_tables))]
        if has_fbgemm(workload.device, "fbgemm::pruned_hashmap_lookup"):
            contestants.append(Contestant(FBGEMM, _fbgemm(workload, slots)))
        name = f"triton/find_rows/{setup.case(distribution)}"
        yield from race(name, workload, contestants, workload.count * 32)


def _held(workload: Workload) -> list[torch.Tensor]:
    """The ids of each table, of which the n-th has row n; none is -1."""
    rows, tables = workload.setup.rows, workload.setup.tables
    return [
        mix64(torch.arange(table * rows + 1, (table + 1) * rows + 1, device=workload.device)) for table in range(tables)
    ]


def _of_tables(ids_of_tables: list[torch.Tensor], dense: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [ids[rows] for ids, rows in zip(ids_of_tables, dense, strict=True)]


def _ends(workload: Workload) -> torch.Tensor:
    per_table = workload.count // workload.setup.tables
    return torch.arange(1, workload.setup.tables + 1, device=workload.device) * per_table


def _ours(workload: Workload, slots: torch.Tensor) -> Callable[[int], object]:
    setup, device = workload.setup, workload.device
    count = slots.shape[0] // setup.tables
    facts = [
        IndexFacts.without_index()._replace(
            slots_start=2 * table * count, slot_mask=count - 1, side_start=table, rows=setup.rows, table_rows=setup.rows
        )
        for table in range(setup.tables)
    ]
    indexes = ReadIndexes(slots, torch.full((setup.tables,), -1, device=device), torch.tensor(facts, device=device))
    ends = _ends(workload)
    return lambda i: find_rows(workload.ids[i], ends, indexes)[0]


def _search(workload: Workload, ids_of_tables: list[torch.Tensor]) -> Callable[[int], object]:
    in_order = [ids.sort() for ids in ids_of_tables]

    def find(i: int) -> torch.Tensor:
        rows_found = []
        for own, (ids, rows) in zip(workload.by_table(workload.ids[i]), in_order, strict=True):
            places = torch.searchsorted(ids, own).clamp_(max=ids.numel() - 1)
            rows_found.append(torch.where(ids[places] == own, rows[places], -1))
        return torch.cat(rows_found)

    return find


def _fbgemm(workload: Workload, slots: torch.Tensor) -> Callable[[int], object]:
    starts = [0, *accumulate([slots.shape[0] // workload.setup.tables] * workload.setup.tables)]
    slot_offsets = torch.tensor(starts, device=workload.device)
    return lambda i: torch.ops.fbgemm.pruned_hashmap_lookup(workload.ids[i], workload.offsets, slots, slot_offsets)
