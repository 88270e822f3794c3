"""The big buffers of an exported program, and how they are filled: in memory, or in a file that was saved before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from recfx.exporter.tables import TableSource
from recfx.ir.tables import TableSpec
from recfx.kernels.quantized_rows import quantize_rows
from recfx.serving import FindRows, PoolRows
from recfx.serving.pool_rows import FORMATS, RowFormat


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

    def fill(self) -> None:
        """Write the content into the buffer itself."""
        target, position = self.buffer.view(-1).view(torch.uint8), 0
        for piece in self.pieces():
            data = piece.reshape(-1).view(torch.uint8)
            target[position : position + data.numel()] = data
            position += data.numel()


def fillings_of(graph_module: fx.GraphModule, tables: Mapping[str, TableSource]) -> list[Filling]:
    """The buffers of one collection's exported graph that hold slots and rows.

    Args:
        graph_module: the graph after all export passes.
        tables: where each table comes from, by name.
    """
    found = []
    for name, module in graph_module.named_modules():
        if isinstance(module, FindRows):
            sources = [tables[table] for table in module.hashed]
            found.append(Filling(f"{name}.slots", module.slots, _slots(sources)))
        elif isinstance(module, PoolRows):
            stored = [(tables[spec.name], spec) for spec in module.specs]
            found.append(Filling(f"{name}.rows", module.rows, _rows(stored)))
    return found


def _slots(sources: list[TableSource]) -> Callable[[], Iterator[torch.Tensor]]:
    return lambda: (piece for source in sources for piece in source.slot_pieces())


def _rows(stored: list[tuple[TableSource, TableSpec]]) -> Callable[[], Iterator[torch.Tensor]]:
    return lambda: (
        stored_rows(piece, FORMATS[spec.dtype]) for source, spec in stored for piece in source.row_pieces()
    )


def stored_rows(rows: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """Rows in the form in which a file stores them.

    Args:
        rows: floats ``[n, dim]``.
        form: the form.

    Returns:
        uint8 ``[n, bytes]``.
    """
    if form.is_quantized:
        padded = form.columns(rows.size(1)) - rows.size(1)
        return quantize_rows(torch.nn.functional.pad(rows, (0, padded), mode="replicate") if padded else rows, form.bits)
    dtype = torch.float16 if form.bits == 16 else torch.float32
    return rows.to(dtype).contiguous().view(torch.uint8)
