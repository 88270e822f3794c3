"""The report of an export: what was written, how big it is, and what quantization costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from recfx.errors import Diagnostic, plural
from recfx.errors.grid import Grid, size
from recfx.errors.shown import Shown
from recfx.passes.base import PassRecord


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
class ExportReport(Shown):
    """What ``recfx.export`` returns. ``str()`` is a table of the file's tables; notebooks show one.

    Example:
        >>> report = recfx.export(Model(), "model.pt", sample)
        >>> report.format, report.tables[0].rows
        ('torchscript', 100)

    Args:
        path: the file.
        format: ``"torchscript"`` or ``"pt2"``.
        bytes: the size of the file.
        tables: every table.
        graph: the text of the exported graph.
        passes: what each pass did, by collection.
        output_error: the largest absolute difference of an output on the sample from the model's.
        libraries: shared libraries to be shipped with the file, with ``portable=False``: a server without Python loads
            them before it, beside torch's and FBGEMM's.
        notes: what else there is to know.
        can_be_followed: whether ``export_delta`` takes the file as a base.
    """

    MOST = 20

    path: Path
    format: str
    bytes: int
    tables: tuple[TableSize, ...]
    graph: str
    passes: dict[str, list[PassRecord]]
    output_error: float
    libraries: tuple[Path, ...] = ()
    notes: tuple[Diagnostic, ...] = field(default=())
    can_be_followed: bool = False

    def __repr__(self) -> str:
        return (
            f"ExportReport({self.path.name!r}, {self.format}, {size(self.bytes)}, {plural(len(self.tables), 'table')})"
        )

    def as_grid(self) -> Grid:
        """The tables of the file, and what else there is to know; ``str()`` and notebooks show it.

        Example:
            >>> recfx.export(Model(), "model.pt", sample).as_grid().columns
            ('table', 'rows', 'stored as', 'size')
        """
        above = [f"largest error of an output on the sample: {self.output_error:.3g}"]
        above += [f"needs {library}: ship it too; servers without Python load it first" for library in self.libraries]
        above += map(str, self.notes)
        title = f"{self.path}: {self.format}, {size(self.bytes)}"
        return Grid.of(title, self.tables, _COLUMNS, set(_COLUMNS) - {"table", "stored as"}, above=tuple(above))


@dataclass
class TableChanges:
    """What a delta holds of one table.

    Args:
        collection: fully qualified name of its collection.
        table: its name.
        rows: how many rows have changed.
        new: how many ids have got a row.
        removed: how many ids have lost theirs.
        bytes: the bytes of all that.
    """

    collection: str
    table: str
    rows: int = 0
    new: int = 0
    removed: int = 0
    bytes: int = 0


@dataclass(frozen=True, repr=False)
class DeltaReport(Shown):
    """What ``recfx.export_delta`` returns. ``str()`` is a table of the tables that have changed; notebooks show one.

    Example:
        >>> model = recfx.convert(Model())
        >>> report = recfx.export(model, "model.pt", sample)
        >>> recfx.export_delta(model, "model.1.delta", base="model.pt").number
        1

    Args:
        path: the file.
        version: the version that it makes, 32 hexadecimal digits.
        number: how many deltas there are from the base to this one.
        bytes: the size of the file.
        seconds: how long it took to write it.
        tables: every table of the base.
        tensors: the names of the other tensors in it.
    """

    MOST = 20

    path: Path
    version: str
    number: int
    bytes: int
    seconds: float
    tables: tuple[TableChanges, ...]
    tensors: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"DeltaReport({self.path.name!r}, {size(self.bytes)}, {plural(len(self.tables), 'table')})"

    def as_grid(self) -> Grid:
        """The tables that have changed; ``str()`` and notebooks show it.

        Example:
            >>> report = recfx.export(model := recfx.convert(Model()), "model.pt", sample)
            >>> recfx.export_delta(model, "model.1.delta", base="model.pt").as_grid().above
            ('0 other tensors changed',)
        """
        title = f"{self.path}: delta {self.number}, {size(self.bytes)}, {self.seconds:.3g} s"
        above = (f"{plural(len(self.tensors), 'other tensor')} changed",)
        changed = [table for table in self.tables if table.bytes]
        return Grid.of(title, changed, _CHANGES, set(_CHANGES) - {"table"}, above=above)


_CHANGES: dict[str, Callable[[TableChanges], str]] = {
    "table": lambda table: f"{table.collection}.{table.table}" if table.collection else table.table,
    "rows": lambda table: f"{table.rows:,}",
    "new ids": lambda table: f"{table.new:,}",
    "removed ids": lambda table: f"{table.removed:,}",
    "size": lambda table: size(table.bytes),
}

_COLUMNS: dict[str, Callable[[TableSize], str]] = {
    "table": lambda table: f"{table.collection}.{table.table}" if table.collection else table.table,
    "rows": lambda table: f"{table.rows:,}",
    "stored as": lambda table: table.stored_as,
    "size": lambda table: size(table.row_bytes),
    "before": lambda table: size(table.bytes_before) if table.row_bytes != table.bytes_before else "",
    "largest error": lambda table: f"{table.error:.3g}" if table.row_bytes != table.bytes_before else "",
    "ids": lambda table: f"{table.ids:,}" if table.slot_bytes else "",
    "size of index": lambda table: size(table.slot_bytes) if table.slot_bytes else "",
}
