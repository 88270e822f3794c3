"""``lookup`` of an exported graph: one lookup of a group of tables, whatever their rows consist of."""

from typing import NamedTuple

import torch

from recfx.errors import Diagnostic
from recfx.exporter.serving.find_rows import index_facts
from recfx.exporter.serving.select_bags import Bags, ServedNode
from recfx.ir.context import FrozenIndex, LookupFacts
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.ir.tables import TableSpec
from recfx.kernels.lookup.quantized_rows import row_bytes

_HOST = 3  # fbgemm_gpu's EmbeddingLocation.HOST
_MODES = {"SUM": 0, "MEAN": 1, NOT_COMBINED: 2}  # its PoolingMode
_FLOAT32 = 0  # its SparseType


class RowFormat(NamedTuple):
    """How the rows of a table are stored: ``name`` as for ``export``, FBGEMM's number for it, the bits of a column, and
    whether each row has a scale and a bias, see ``recfx/kernels/lookup/quantized_rows.py``.
    """

    name: str
    sparse_type: int
    bits: int
    is_quantized: bool = False

    def columns(self, dim: int) -> int:
        """The number of columns of a stored row; FBGEMM wants an even number of columns of 4 bits."""
        return dim + dim % 2 if self.bits == 4 else dim

    def bytes(self, dim: int) -> int:
        """The size of a stored row."""
        columns = self.columns(dim)
        return row_bytes(columns, self.bits) if self.is_quantized else columns * self.bits // 8


FORMATS: dict[torch.dtype, RowFormat] = {
    torch.float32: RowFormat("fp32", 0, 32),
    torch.float16: RowFormat("fp16", 1, 16),
    torch.quint8: RowFormat("int8", 2, 8, True),
    torch.quint4x2: RowFormat("int4", 3, 4, True),
}


class PoolRows(ServedNode):
    """Pool the rows of a group of tables with FBGEMM's inference operator, which skips rows of -1; or read each row as
    it is, if they are not combined, and zeros for rows of -1: all ids of a feature are one bag then.
    """

    kernel = "fbgemm"
    index_attributes: tuple[str, ...] = ()
    positions: list[int]
    kept_columns: torch.Tensor
    first_bags: torch.Tensor
    rows: torch.Tensor

    def __init__(
        self, tables: tuple[TableSpec, ...], combine: str, features: tuple[str, ...], is_weighted: bool
    ) -> None:
        super().__init__()
        self.specs = tables
        self.combine = combine
        self.mode, self.is_pooled = _MODES[combine], combine != NOT_COMBINED
        self.is_weighted = is_weighted
        self.num_features = len(features)
        formats = [FORMATS[table.dtype] for table in tables]
        begins = [0]
        for table, form in zip(tables, formats, strict=True):
            begins.append(begins[-1] + table.num_embeddings * form.bytes(table.embedding_dim))
        keys = [name for table in tables for name in table.embedding_names]
        place = {name: number for number, name in enumerate(features)}
        self.positions = [place[name] for name in keys]
        self.permutes = self.positions != list(range(len(features)))
        of_feature = [number for number, table in enumerate(tables) for _ in table.embedding_names]
        columns = [formats[table].columns(tables[table].embedding_dim) for table in of_feature]
        ends = torch.tensor([0, *columns]).cumsum(0)
        self.total_columns = int(ends[-1])
        self.most_columns = [0, 0, 0, 0]  # of int4, int8, fp16 and fp32, as FBGEMM's operator takes them
        for number, count in zip(of_feature, columns, strict=True):
            of_type = 3 - formats[number].sparse_type
            self.most_columns[of_type] = max(self.most_columns[of_type], count)
        kept = [
            column
            for table, end in zip(of_feature, ends[:-1].tolist(), strict=True)
            for column in range(end, end + tables[table].embedding_dim)
        ]
        if not self.is_pooled:
            self.total_columns, kept = columns[0], kept[: tables[0].embedding_dim]
        self.drops_columns = len(kept) < self.total_columns
        self.output_dtype = tables[0].output_dtype
        self.register_buffer("kept_columns", torch.tensor(kept))
        self.register_buffer("first_bags", torch.arange(len(keys) + 1))
        self.register_buffer("placements", torch.full((len(keys),), _HOST, dtype=torch.int32))
        self.register_buffer("begins", torch.tensor([begins[table] for table in of_feature]))
        sparse_types = [formats[table].sparse_type for table in of_feature]
        self.register_buffer("sparse_types", torch.tensor(sparse_types, dtype=torch.uint8))
        self.register_buffer("column_ends", ends.int())
        self.register_buffer("nowhere", torch.empty(0, dtype=torch.uint8))
        self.register_buffer("position", torch.tensor(self.positions, dtype=torch.int32))
        self.register_buffer("rows", torch.empty(begins[-1], dtype=torch.uint8))

    @classmethod
    def declines(cls, lookup: LookupFacts) -> Diagnostic | None:
        """Why it does not serve a lookup, whose tables have the dtypes of stored rows; None if it does."""
        return None

    def parts(self) -> list[tuple[torch.Tensor, tuple[TableSpec, ...]]]:
        """The buffers that hold rows, and the tables in each, one behind the other."""
        return [(self.rows, self.specs)]

    def forward(self, bags: Bags) -> torch.Tensor:
        """``bags``: rows of every table of the collection. Returns ``[B, sum D]``, or ``[n, D]`` if not combined."""
        values, offsets, weights = self.in_order(bags)
        pooled = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            self.rows, self.nowhere, self.placements, self.begins, self.sparse_types, self.column_ends,
            self.total_columns, 0, self.most_columns[0], self.most_columns[1], self.most_columns[2],
            self.most_columns[3], values, offsets, self.mode, weights, output_dtype=0, row_alignment=1,
        )  # fmt: skip
        return self.finished(pooled)

    def in_order(self, bags: Bags) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The values, offsets and weights of the bags of these tables' features."""
        values, offsets, weights = bags.values, bags.offsets, bags.weights
        batch_size = (offsets.numel() - 1) // self.num_features
        if self.permutes:
            lengths = offsets.diff().view(self.num_features, batch_size)
            lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(
                self.position, lengths, values, weights, None
            )
            offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.view(-1))
        if not self.is_pooled:
            offsets = offsets.index_select(0, self.first_bags * batch_size)
        return values, offsets, weights if self.is_weighted else None

    def finished(self, pooled: torch.Tensor) -> torch.Tensor:
        """The tables' own columns, without FBGEMM's padding, in the collection's dtype."""
        if self.drops_columns:
            pooled = pooled.index_select(1, self.kept_columns)
        return pooled.to(self.output_dtype)


class FindAndPool(PoolRows):
    """Find ids and pool their rows; it takes ids, where ``PoolRows``, which it replaces, takes rows. ``hashed`` has the
    frozen index of each table whose ids are not rows.
    """

    kernel = "recfx"
    index_attributes = ("side_rows",)
    positions: list[int]
    hashed: list[str]
    rows: torch.Tensor
    slots: torch.Tensor

    def __init__(
        self,
        tables: tuple[TableSpec, ...],
        combine: str,
        features: tuple[str, ...],
        is_weighted: bool,
        hashed: dict[str, FrozenIndex],
    ) -> None:
        super().__init__(tables, combine, features, is_weighted)
        self.hashed = list(hashed)
        self.counts = [table.num_embeddings for table in tables]
        self.columns = [FORMATS[table.dtype].columns(table.embedding_dim) for table in tables]
        self.formats = [FORMATS[table.dtype].sparse_type for table in tables]
        self.table_of_feature = [number for number, table in enumerate(tables) for _ in table.embedding_names]
        self.slot_counts = [hashed[table.name].slots if table.name in hashed else 0 for table in tables]
        self.side_rows = [hashed[table.name].side_row if table.name in hashed else -1 for table in tables]
        facts = [index_facts(table) for table in tables]
        self.dense_rows, self.share_buckets, self.seeds = (list(values) for values in zip(*facts, strict=True))
        self.register_buffer("slots", torch.empty(sum(self.slot_counts), 2, dtype=torch.int64))

    def forward(self, bags: Bags) -> torch.Tensor:
        """``bags``: ids of every table of the collection. Returns ``[B, sum D]``, or ``[n, D]`` if not combined."""
        values, offsets, weights = self.in_order(bags)
        pooled = torch.ops.recfx.served_lookup(
            values, offsets, self.rows, self.counts, self.columns, self.formats, self.table_of_feature, self.slots,
            self.slot_counts, self.side_rows, self.dense_rows, self.share_buckets, self.seeds, self.combine == "MEAN",
            weights, not self.is_pooled,
        )  # fmt: skip
        return self.finished(pooled)
