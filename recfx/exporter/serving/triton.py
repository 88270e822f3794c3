"""``lookup`` of an exported graph for devices by recfx's kernel in Triton, which reads rows of 8-bit or 4-bit codes.
Python registers its operator, so files that call it need Python, recfx and, for a device, Triton.
"""

from dataclasses import replace

import torch

import recfx.kernels.lookup.quantized_lookup  # noqa: F401  registers the operator
from recfx.errors import Diagnostic
from recfx.exporter.serving.aten import AtenPoolRows, reordered
from recfx.exporter.serving.pool_rows import FORMATS
from recfx.exporter.serving.select_bags import Bags
from recfx.ir.context import LookupFacts
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.ir.tables import TableSpec
from recfx.lowering.triton import target as triton_target

DEVICE_TYPES = ("cuda", "npu")
"""The kinds of devices that the kernel can be compiled for."""


class TritonPoolRows(AtenPoolRows):
    """``PoolRows`` in one launch, for tables that all have codes of 8 bits or all have codes of 4 bits."""

    kernel = "triton"
    # As in the base class: TorchScript does not read the annotations of base classes.
    positions: list[int]
    dims: list[int]
    table_of_feature: list[int]

    def __init__(
        self, tables: tuple[TableSpec, ...], combine: str, features: tuple[str, ...], is_weighted: bool
    ) -> None:
        super().__init__(tables, combine, features, is_weighted)
        self.bits = FORMATS[tables[0].dtype].bits
        self.dims = [table.embedding_dim for table in tables]
        self.table_of_feature = [number for number, table in enumerate(tables) for _ in table.embedding_names]

    @classmethod
    def declines(cls, lookup: LookupFacts) -> Diagnostic | None:
        if lookup.combine == NOT_COMBINED:
            return Diagnostic("unsupported_combine", "", "the kernel pools rows.", by=cls.kernel)
        dtypes = {table.dtype for table in lookup.tables}
        if len(dtypes) > 1 or not FORMATS[lookup.tables[0].dtype].is_quantized:
            names = ", ".join(sorted(FORMATS[dtype].name for dtype in dtypes))
            message = f"a launch takes tables of int8 or of int4, not of {names}."
            what_to_do = "store all tables of the collection as int8, or all as int4, or leave them to ATen."
            return Diagnostic("dtype", "", message, what_to_do, by=cls.kernel)
        refusal = triton_target.too_many_columns(lookup)
        return None if refusal is None else replace(refusal, by=cls.kernel)

    def forward(self, bags: Bags) -> torch.Tensor:
        """``bags``: rows of every table of the collection. Returns ``[B, sum D]``."""
        rows, offsets, weights = bags.values, bags.offsets, bags.weights
        if self.permutes:
            ends = bags.ends
            assert ends is not None
            counts = [ends[number + 1] - ends[number] for number in range(self.num_features)]
            lengths = offsets.diff().view(self.num_features, (offsets.numel() - 1) // self.num_features)
            place = torch.tensor(self.positions, device=lengths.device)
            offsets = torch.cat([lengths.new_zeros(1), lengths.index_select(0, place).view(-1)]).cumsum(0)
            rows = reordered(rows, counts, self.positions)
            weights = None if weights is None else reordered(weights, counts, self.positions)
        tables: list[torch.Tensor] = []
        for stored in self.stored:
            tables.append(stored.rows)  # type: ignore[arg-type]
        pooled = torch.ops.recfx.quantized_lookup_triton(
            rows,
            offsets,
            tables,
            self.dims,
            self.bits,
            self.table_of_feature,
            self.combine == "MEAN",
            weights if self.is_weighted else None,
        )
        return pooled.to(self.output_dtype)
