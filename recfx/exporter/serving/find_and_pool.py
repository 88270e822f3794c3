"""``hash_lookup`` of an exported graph: ``find_rows`` and ``lookup`` in one of recfx's own operators."""

import torch

from recfx.exporter.serving.bags import Bags
from recfx.exporter.serving.pool_rows import FORMATS, PoolRows
from recfx.ir.facts import FrozenIndex
from recfx.ir.tables import TableSpec


class FindAndPool(PoolRows):
    """Find ids and pool their rows; what it takes are ids, where ``PoolRows`` takes rows.

    Args:
        pool: the lookup that it replaces.
        hashed: the frozen index of each of its tables whose ids are not rows, in order.
    """

    kernel = "recfx"
    positions: list[int]
    kept: list[int]
    hashed: list[str]
    rows: torch.Tensor
    slots: torch.Tensor

    def __init__(self, pool: PoolRows, hashed: dict[str, FrozenIndex]) -> None:
        super().__init__(pool.specs, pool.combine, pool.features, pool.is_weighted)
        self.label = pool.label
        tables = self.specs
        self.hashed = list(hashed)
        self.counts = [table.num_embeddings for table in tables]
        self.columns = [FORMATS[table.dtype].columns(table.embedding_dim) for table in tables]
        self.formats = [FORMATS[table.dtype].sparse_type for table in tables]
        self.table_of_feature = [number for number, table in enumerate(tables) for _ in table.embedding_names]
        self.slot_counts = [hashed[table.name].slots if table.name in hashed else 0 for table in tables]
        self.side_rows = [hashed[table.name].side_row if table.name in hashed else -1 for table in tables]
        facts = [_index_facts(table) for table in tables]
        self.dense_rows = [dense_rows for dense_rows, _, _ in facts]
        self.share_buckets = [share_buckets for _, share_buckets, _ in facts]
        self.seeds = [seed for _, _, seed in facts]
        self.register_buffer("slots", torch.empty(sum(self.slot_counts), 2, dtype=torch.int64))

    def forward(self, bags: Bags) -> torch.Tensor:
        """``bags``: ids of every table of the collection. Returns ``[B, sum D]``."""
        values, offsets, weights = bags.values, bags.offsets, bags.weights
        if self.permutes:
            lengths = offsets.diff().view(self.num_features, (offsets.numel() - 1) // self.num_features)
            lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(
                self.position, lengths, values, weights, None
            )
            offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.view(-1))
        pooled = torch.ops.recfx.served_lookup(
            values,
            offsets,
            self.rows,
            self.counts,
            self.columns,
            self.formats,
            self.table_of_feature,
            self.slots,
            self.slot_counts,
            self.side_rows,
            self.dense_rows,
            self.share_buckets,
            self.seeds,
            self.combine == "MEAN",
            weights if self.is_weighted else None,
        )
        if self.drops_columns:
            pooled = pooled.index_select(1, self.kept_columns)
        return pooled.to(self.output_dtype)


def _index_facts(table: TableSpec) -> tuple[int, int, int]:
    """``dense_rows``, ``share_buckets`` and ``seed`` of a table's index; zeros if it has none."""
    config = table.hashing
    if config is None or not table.has_index:
        return 0, 0, 0
    return config.dense_rows, config.buckets if config.unseen == "share" else 0, config.seed
