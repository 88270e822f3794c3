"""The big buffers of an exported program: where their content comes from, in pieces, and how they are filled.

They are filled in memory, or in a file that was saved before, so that no copy of a table is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from recfx.errors import ExportError
from recfx.exporter.serving.find_rows import FindFrozenRows
from recfx.exporter.serving.pool_rows import FORMATS, FindAndPool, PoolRows, RowFormat
from recfx.exporter.table_sources import TableSource
from recfx.ir.tables import TableSpec
from recfx.kernels.lookup.quantized_rows import dequantize_rows, quantize_rows
from recfx.verification.compare_models import largest_difference


@dataclass(frozen=True)
class Filling:
    """What one buffer of a program will hold.

    Args:
        name: the buffer's name in the graph that it belongs to.
        buffer: allocated but not written, so that it takes no memory.
        pieces: makes the pieces of its content, in order: contiguous tensors of any dtype.
    """

    name: str
    buffer: torch.Tensor
    pieces: Callable[[], Iterator[torch.Tensor]]

    def bytes(self) -> Iterator[torch.Tensor]:
        """The content in pieces, uint8 ``[n]`` each."""
        for piece in self.pieces():
            yield piece.reshape(-1).view(torch.uint8)

    def fill(self) -> None:
        """Write the content into the buffer itself."""
        target, position = self.buffer.view(-1).view(torch.uint8), 0
        for data in self.bytes():
            target[position : position + data.numel()] = data
            position += data.numel()


def fillings_of(
    path: str, graph_module: fx.GraphModule, tables: Mapping[str, TableSource], errors: dict[str, float]
) -> list[Filling]:
    """The buffers of one collection's exported graph that hold slots and rows; filling them writes ``errors``."""
    fillings = []
    for name, module in graph_module.named_modules():
        if isinstance(module, PoolRows):
            for part, buffer, specs in module.parts():
                stored = [(tables[spec.name], spec) for spec in specs]
                fillings.append(Filling(f"{name}.{part}", buffer, partial(_rows, path, stored, errors)))
        if isinstance(module, FindFrozenRows | FindAndPool):
            sources = [tables[table] for table in module.hashed]
            fillings.append(Filling(f"{name}.slots", module.slots, partial(_slots, sources)))
    return fillings


def _slots(sources: list[TableSource]) -> Iterator[torch.Tensor]:
    for source in sources:
        yield from source.slot_pieces()


def _rows(path: str, stored: list[tuple[TableSource, TableSpec]], errors: dict[str, float]) -> Iterator[torch.Tensor]:
    for source, spec in stored:
        form, dim = FORMATS[spec.dtype], spec.embedding_dim
        errors[spec.name] = 0.0
        for piece in source.row_pieces():
            rows = stored_rows(piece, form)
            if piece.dtype != spec.dtype and piece.numel():
                values = values_of(rows, form, dim)
                _check_range(path, spec.name, form, piece, values)
                errors[spec.name] = max(errors[spec.name], largest_difference(piece.float(), values))
            yield rows


def _check_range(path: str, table: str, form: RowFormat, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Refuse finite numbers that could not be stored as such: FP16, and scales and biases, end at 65504."""
    is_lost = rows.isfinite().all(1) & ~values.isfinite().all(1)
    if is_lost.any():
        raise ExportError(
            f"rows of table {table!r}, one of which has a value of {float(rows[is_lost].abs().max()):.3g}, have no "
            f"finite value as {form.name}.",
            reason="rows_out_of_range",
            module_path=path,
            what_to_do=f"export with quantize={{{table!r}: None}}, or find out why the row has grown so much.",
        )


def stored_rows(rows: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """Floats ``[n, dim]`` in the form in which a file stores them, uint8 ``[n, bytes]``."""
    if form.is_quantized:
        padded = form.columns(rows.size(1)) - rows.size(1)
        return quantize_rows(
            torch.nn.functional.pad(rows, (0, padded), mode="replicate") if padded else rows, form.bits
        )
    dtype = torch.float16 if form.bits == 16 else torch.float32
    return rows.to(dtype).contiguous().view(torch.uint8)


def values_of(stored: torch.Tensor, form: RowFormat, dim: int) -> torch.Tensor:
    """The values of stored rows, float32 ``[n, dim]``; the inverse of ``stored_rows``."""
    if form.is_quantized:
        return dequantize_rows(stored, form.columns(dim), form.bits)[:, :dim]
    return stored.view(torch.float16 if form.bits == 16 else torch.float32).float()
