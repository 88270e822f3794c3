"""``lookup`` of an exported graph for devices by recfx's kernels in Triton, of rows of floats or of codes.
Python registers their operators, so files that call them need Python, recfx and, for a device, Triton.
"""

from dataclasses import replace

import torch

import recfx.kernels.lookup.pooled_lookup
import recfx.kernels.lookup.quantized_lookup  # noqa: F401  these register operators
from recfx.errors import Diagnostic
from recfx.exporter.serving.aten import AtenPoolRows, reordered
from recfx.exporter.serving.pool_rows import FORMATS
from recfx.exporter.serving.select_bags import Bags
from recfx.ir.context import LookupFacts
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.ir.tables import TableSpec
from recfx.lowering.triton import target as triton_target

DEVICE_TYPES = ("cuda", "npu")
"""The kinds of devices that the kernels can be compiled for."""


class TritonPoolRows(AtenPoolRows):
    """``PoolRows`` in one launch, for tables whose rows are all stored alike; rows of codes are pooled alone."""

    kernel = "triton"
    __constants__ = ("is_quantized",)  # files have one of the operators
    # As in the base class: TorchScript does not read the annotations of base classes.
    positions: list[int]
    dims: list[int]
    table_of_feature: list[int]
    first_bags: torch.Tensor

    def __init__(
        self, tables: tuple[TableSpec, ...], combine: str, features: tuple[str, ...], is_weighted: bool
    ) -> None:
        super().__init__(tables, combine, features, is_weighted)
        self.bits, self.is_quantized = FORMATS[tables[0].dtype].bits, FORMATS[tables[0].dtype].is_quantized
        self.dims = [table.embedding_dim for table in tables]
        self.table_of_feature = [number for number, table in enumerate(tables) for _ in table.embedding_names]

    @classmethod
    def declines(cls, lookup: LookupFacts) -> Diagnostic | None:
        names = sorted({FORMATS[table.dtype].name for table in lookup.tables})
        if len(names) > 1:
            message = f"a launch takes tables that are stored alike, not of {', '.join(names)}."
            what_to_do = "store all tables of the collection alike, or leave them to ATen."
            return Diagnostic("dtype", "", message, what_to_do, by=cls.kernel)
        if lookup.combine == NOT_COMBINED and FORMATS[lookup.tables[0].dtype].is_quantized:
            return Diagnostic("unsupported_combine", "", "the kernel pools rows of codes.", by=cls.kernel)
        refusal = triton_target.too_many_columns(lookup)
        return None if refusal is None else replace(refusal, by=cls.kernel)

    def forward(self, bags: Bags) -> torch.Tensor:
        """``bags``: rows of every table of the collection. Returns ``[B, sum D]``, or ``[n, D]`` if not combined."""
        rows, offsets, weights = bags.values, bags.offsets, bags.weights
        batch_size = (offsets.numel() - 1) // self.num_features
        if self.permutes:
            ends = bags.ends
            assert ends is not None
            counts = [ends[number + 1] - ends[number] for number in range(self.num_features)]
            lengths = offsets.diff().view(self.num_features, batch_size)
            place = torch.tensor(self.positions, device=lengths.device)
            offsets = torch.cat([lengths.new_zeros(1), lengths.index_select(0, place).view(-1)]).cumsum(0)
            rows = reordered(rows, counts, self.positions)
            weights = None if weights is None else reordered(weights, counts, self.positions)
        tables: list[torch.Tensor] = []
        for stored in self.stored:
            tables.append(stored.rows)  # type: ignore[arg-type]
        if not self.is_pooled:
            offsets = offsets.index_select(0, self.first_bags * batch_size)
        is_mean, scales = self.combine == "MEAN", weights if self.is_weighted and self.is_pooled else None
        if self.is_quantized:
            pooled = torch.ops.recfx.quantized_lookup_triton(
                rows, offsets, tables, self.dims, self.bits, self.table_of_feature, is_mean, scales
            )
        else:
            pooled = torch.ops.recfx.pooled_lookup_triton(
                rows, offsets, tables, self.table_of_feature, is_mean, scales, not self.is_pooled
            )
        return pooled.to(self.output_dtype)
