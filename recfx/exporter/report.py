"""The report of an export: what was written, how big it is, and what quantization costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from recfx.errors import Diagnostic, plural
from recfx.ir.snapshot import PassRecord


@dataclass(frozen=True)
class TableSize:
    """One table of an exported file.

    Args:
        collection: fully qualified name of its collection.
        table: its name.
        stored_as: ``"fp32"``, ``"fp16"``, ``"int8"`` or ``"int4"``.
        rows: how many rows it has.
        ids: how many ids its index holds.
        row_bytes: the bytes of all its rows in the file.
        slot_bytes: the bytes of its index.
        bytes_before: the bytes of its rows in the model.
        error: the largest absolute difference between a value of a stored row and the model's; 0 if none was changed,
            inf if a NaN or an infinite value has taken the other values of its row with it.
    """

    collection: str
    table: str
    stored_as: str
    rows: int
    ids: int
    row_bytes: int
    slot_bytes: int
    bytes_before: int
    error: float


@dataclass(frozen=True, repr=False)
class ExportReport:
    """What ``recfx.export`` returns.

    Example:
        >>> report = recfx.export(Model(), "model.pt", sample)
        >>> report.format, report.tables[0].rows
        ('torchscript', 100)

    Args:
        path: the file.
        format: ``"torchscript"`` or ``"pt2"``.
        bytes: the size of the file.
        tables: every table.
        graph: the text of the exported graph; "" if TorchScript compiled the model's own code.
        passes: what each pass did, by collection.
        output_error: the largest absolute difference of an output on the sample from the model's.
        libraries: shared libraries that a server has to load besides torch's and FBGEMM's.
        notes: what else there is to know.
    """

    path: Path
    format: str
    bytes: int
    tables: tuple[TableSize, ...]
    graph: str
    passes: dict[str, list[PassRecord]]
    output_error: float
    libraries: tuple[Path, ...] = ()
    notes: tuple[Diagnostic, ...] = field(default=())

    def __repr__(self) -> str:
        tables = plural(len(self.tables), "table")
        return f"ExportReport({self.path.name!r}, {self.format}, {_bytes(self.bytes)}, {tables})"

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.format}, {_bytes(self.bytes)}"]
        for table in self.tables:
            name = f"{table.collection}.{table.table}" if table.collection else table.table
            line = f"  {name}: {table.rows} rows as {table.stored_as}, {_bytes(table.row_bytes)}"
            if table.row_bytes != table.bytes_before:
                line += f" instead of {_bytes(table.bytes_before)}, largest error {table.error:.3g}"
            if table.slot_bytes:
                line += f"; {table.ids} ids in {_bytes(table.slot_bytes)} of slots"
            lines.append(line)
        lines.append(f"  largest error of an output on the sample: {self.output_error:.3g}")
        lines += [f"  needs {library}" for library in self.libraries]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
