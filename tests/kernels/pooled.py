"""Lookups that pool, or gather, rows of tables with and without an index."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.index.buckets import shared_rows
from recfx.kernels.index.hash_index import find
from recfx.kernels.index.index_buffers import IndexView
from recfx.kernels.lookup import pooled_lookup_reference
from recfx.kernels.lookup.pooled_lookup import find_and_pool

DIMS = st.sampled_from([1, 3, 4, 7, 16, 20, 33, 64, 100, 128, 200])
LENGTHS = st.sampled_from([0, 0, 1, 2, 5, 31, 32, 33, 64, 70, 200])


@dataclass
class Case:
    """A lookup: two features read table 0 if ``twice``, every other table has one."""

    weights: list[torch.Tensor]
    table_of_feature: list[int]
    offsets: torch.Tensor
    scale: torch.Tensor | None
    indexes: list[IndexView]
    ids: torch.Tensor
    unpooled: bool = False

    def by_operator(self, keep_rows: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        arguments = (self.ids, self.offsets, self.weights, self.table_of_feature, self.indexes, self.scale)
        outputs, rows, absent = find_and_pool(*arguments, keep_rows, self.unpooled)
        return self.joined(outputs), rows, absent

    def joined(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        if self.unpooled:
            assert [len(rows) for rows in outputs] == self.offsets.diff().tolist()
            return torch.cat(outputs)
        (pooled,) = outputs
        return pooled

    def by_reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Feature by feature."""
        features = len(self.table_of_feature)
        borders = self.offsets[:: (self.offsets.numel() - 1) // features or 1].tolist()
        rows, absent = torch.full_like(self.ids, -1), torch.zeros(len(self.weights), dtype=torch.int64)
        for table, begin, end in zip(self.table_of_feature, borders, borders[1:], strict=False):
            view, ids, size = self.indexes[table], self.ids[begin:end], self.weights[table].shape[0]
            rows[begin:end] = ids
            if view.slot_groups.numel() > 0:
                own = find(ids, view.slot_groups, view.side_row, view.dense_rows)
                absent[table] += (own < 0).sum()
                shared = shared_rows(ids, size, view.dense_rows, view.share_buckets or 1, view.seed)
                rows[begin:end] = torch.where((own < 0) & (view.share_buckets != 0), shared, own)
        arguments = (rows, self.offsets, self.weights, self.table_of_feature, False, self.scale, self.unpooled)
        return pooled_lookup_reference.pooled_lookup(*arguments), rows, absent


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tables with and without index; ids that are dense, held, absent, -1; empty bags, batches, tables; not pooled."""
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    unpooled = draw(st.booleans())
    tables, batch_size = draw(st.integers(1, 3)), 1 if unpooled else draw(st.integers(0, 4))
    dim = st.just(draw(DIMS)) if unpooled else DIMS
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    weights, indexes, pools = [], [], []
    for _ in range(tables):
        rows, dense_rows = draw(st.integers(8, 60)), draw(st.integers(0, 4))
        weights.append(torch.randn(rows, draw(dim), generator=generator).to(dtype))
        if draw(st.booleans()):
            indexes.append(IndexView.none())
            pools.append(torch.arange(rows))
            continue
        seed, buckets = draw(st.sampled_from([0, 7])), draw(st.integers(1, 3))
        index = HashIndex(rows, config=HashConfig(dense_rows=dense_rows, buckets=buckets, seed=seed, on_full="share"))
        taken = torch.tensor([-1, 10**12, -5, *range(100, 100 + rows // 2)])
        index.find_or_insert(taken)
        share_buckets = buckets * draw(st.integers(-1, 1))
        indexes.append(IndexView(index.slot_groups, index.side_row, dense_rows, share_buckets, seed))
        absent = torch.arange(10**6, 10**6 + 10)
        pools.append(torch.cat([taken, torch.arange(dense_rows), absent]))
    table_of_feature = [0] * draw(st.integers(0, 1)) + list(range(tables))
    lengths = torch.tensor([[draw(LENGTHS) for _ in range(batch_size)] for _ in table_of_feature], dtype=torch.int64)
    before, after = draw(st.sampled_from([(0, 0), *[(2, 3)] * (not unpooled)]))  # ids in no bag
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)]) + before
    parts = [torch.full((before,), 5)]
    for table, length in zip(table_of_feature, lengths.sum(1).tolist(), strict=True):
        parts.append(pools[table][torch.randint(pools[table].numel(), (length,), generator=generator)])
    ids = torch.cat([*parts, torch.full((after,), 5)])
    scale = torch.randn(ids.numel(), generator=generator) if not unpooled and draw(st.booleans()) else None
    return Case(weights, table_of_feature, offsets, scale, indexes, ids, unpooled)
