"""Lookups in tables as exported files store them, of every format, with and without an index."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.build import library
from recfx.kernels.index.buckets import shared_rows
from recfx.kernels.index.slot_table import find_rows_in_slots
from recfx.kernels.lookup import served_lookup as _operator  # noqa: F401  registers what it returns on meta
from recfx.kernels.lookup.pooled_lookup_reference import pool_bags
from recfx.kernels.lookup.quantized_rows import dequantize_rows, quantize_rows, row_bytes

COLUMNS = st.sampled_from([1, 2, 3, 4, 7, 16, 20, 33, 64, 100, 128, 200, 260])
LENGTHS = st.sampled_from([0, 0, 1, 2, 5, 31, 32, 33, 64, 70, 200])


class ServedTable(NamedTuple):
    """One table of a file."""

    num_rows: int
    columns: int  # of a stored row
    row_format: int  # 0 float32, 1 float16, 2 codes of 8 bits, 3 of 4 bits (an even number of columns)
    slots: int = 0  # of its index, see slot_table.py; 0: it has none, and its ids are its rows
    side_row: int = -1  # the row of id -1
    dense_rows: int = 0  # an id 0 <= id < dense_rows is its own row
    share_buckets: int = 0  # if an id without a row reads one of its bucket, see shared_rows(); 0: it adds nothing
    seed: int = 0


def served_lookup(
    ids: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor, tables: list[ServedTable],
    table_of_feature: list[int], slots: torch.Tensor, mean: bool = False,
    per_sample_weights: torch.Tensor | None = None, unpooled: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The operator."""
    count, columns, formats, *index = map(list, zip(*tables, strict=True))
    of_tables = (count, columns, formats, table_of_feature, slots, *index)
    return library.operators().served_lookup(ids, offsets, rows, *of_tables, mean, per_sample_weights, unpooled)


def served_lookup_reference(
    ids: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    tables: list[ServedTable],
    table_of_feature: list[int],
    slots: torch.Tensor,
    mean: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    unpooled: bool = False,
) -> torch.Tensor:
    """``served_lookup`` in ATen, feature by feature: the definition of what files answer."""
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    values = _values(rows, tables)
    slot_tables = slots.split([table.slots for table in tables])
    pooled = []
    for feature, number in enumerate(table_of_feature):
        table = tables[number]
        bags = offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        stretch = slice(int(bags[0]), int(bags[-1]))
        read = _rows_of(ids[stretch], table, slot_tables[number])
        if bool((read < (-1 if table.slots else 0)).any() or (read >= table.num_rows).any()):
            raise IndexError("an id has no row in its table [id_out_of_range]")
        present = read >= 0
        of_rows = values[number][read[present]]
        if per_sample_weights is not None:
            of_rows = of_rows * per_sample_weights[stretch][present].unsqueeze(1)
        if unpooled:
            bags = torch.arange(read.numel() + 1)
        pooled.append(pool_bags(of_rows, present, bags, mean))
    return torch.cat(pooled, dim=0 if unpooled else 1)


def _rows_of(ids: torch.Tensor, table: ServedTable, slots: torch.Tensor) -> torch.Tensor:
    if table.slots == 0:
        return ids
    own_rows = find_rows_in_slots(ids, slots, torch.tensor([table.side_row]), table.dense_rows)
    if table.share_buckets == 0:
        return own_rows
    shared = shared_rows(ids, table.num_rows, table.dense_rows, table.share_buckets, table.seed)
    return torch.where(own_rows < 0, shared, own_rows)


def _values(rows: torch.Tensor, tables: list[ServedTable]) -> list[torch.Tensor]:
    """The rows of each table, float32 ``[count, columns]``."""
    values, begin = [], 0
    for table in tables:
        bits = (32, 16, 8, 4)[table.row_format]
        size = row_bytes(table.columns, bits) if bits <= 8 else table.columns * bits // 8
        stored = rows[begin : begin + table.num_rows * size].view(table.num_rows, size)
        begin += table.num_rows * size
        if bits <= 8:
            values.append(dequantize_rows(stored, table.columns, bits))
        else:
            values.append(stored.clone().view(torch.float32 if bits == 32 else torch.float16).float())
    return values


@dataclass
class Case:
    """A lookup: two features read table 0, every other table has one."""

    rows: torch.Tensor
    tables: list[ServedTable]
    slots: torch.Tensor
    ids: torch.Tensor
    offsets: torch.Tensor
    mean: bool
    weights: torch.Tensor | None
    unpooled: bool

    @property
    def table_of_feature(self) -> list[int]:
        return [0, *range(len(self.tables))]

    def arguments(self) -> tuple[object, ...]:
        return (
            self.ids, self.offsets, self.rows, self.tables, self.table_of_feature, self.slots, self.mean, self.weights,
            self.unpooled,
        )  # fmt: skip


def stored_rows(values: torch.Tensor, row_format: int) -> torch.Tensor:
    if row_format >= 2:
        return quantize_rows(values, 8 if row_format == 2 else 4)
    return values.to((torch.float32, torch.float16)[row_format]).view(torch.uint8)


@st.composite
def cases(draw: st.DrawFn, times: int = 1) -> Case:
    """Ids that are dense, held, absent, -1; empty bags, batches and tables without ids; ``times`` as many samples."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tables, stored, slots, pools = [], [], [torch.empty(0, 2, dtype=torch.int64)], []
    kind = draw(st.sampled_from(["sum", "mean", "weighted", "unpooled"]))
    of_all = draw(COLUMNS)  # rows that are not pooled are equally wide
    is_odd = kind == "unpooled" and of_all % 2 == 1
    for _ in range(draw(st.integers(1, 3))):
        count, row_format = draw(st.integers(8, 60)), draw(st.integers(0, 2 if is_odd else 3))
        columns = of_all if kind == "unpooled" else draw(COLUMNS)
        columns += columns % 2 if row_format == 3 else 0
        stored.append(stored_rows(torch.randn(count, columns, generator=generator), row_format).reshape(-1))
        if draw(st.booleans()):
            tables.append(ServedTable(count, columns, row_format))
            pools.append(torch.arange(count))
            continue
        dense_rows, buckets, seed = draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.sampled_from([0, 7]))
        index = HashIndex(count, config=HashConfig(dense_rows=dense_rows, buckets=buckets, seed=seed, on_full="share"))
        taken = torch.tensor([-1, 10**12, -5, *range(100, 100 + count // 2)])
        index.find_or_insert(taken)
        slots.append(index.slot_table()[0])
        shared = buckets * draw(st.integers(-1, 1))
        side_row = int(index.side_row[0])
        tables.append(ServedTable(count, columns, row_format, index.slot_count, side_row, dense_rows, shared, seed))
        pools.append(torch.cat([taken, torch.tensor([0, 1, -(2**63), 2**63 - 1, 77777])]))
    batch_size = draw(st.integers(0, 4)) * times
    of_features = [pools[0], *pools]
    drawn = draw(st.lists(LENGTHS, min_size=1, max_size=20))
    lengths = torch.tensor([drawn[bag % len(drawn)] for bag in range(len(of_features) * batch_size)]).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    sizes = lengths.view(len(of_features), batch_size).sum(1).tolist()
    ids = [
        pool[torch.randint(0, pool.numel(), (size,), generator=generator)]
        for pool, size in zip(of_features, sizes, strict=True)
    ]
    weights = torch.randn(int(offsets[-1]), generator=generator) if kind == "weighted" else None
    return Case(
        torch.cat(stored),
        tables,
        torch.cat(slots),
        torch.cat(ids),
        offsets,
        kind == "mean",
        weights,
        kind == "unpooled",
    )
