"""Lookups in tables as exported files store them, of every format, with and without an index."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.lookup.quantized_rows import quantize_rows
from recfx.kernels.lookup.served_lookup import ServedTable

COLUMNS = st.sampled_from([1, 2, 3, 4, 7, 16, 20, 33, 64, 100, 128, 200, 260])
LENGTHS = st.sampled_from([0, 0, 1, 2, 5, 31, 32, 33, 64, 70, 200])


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
