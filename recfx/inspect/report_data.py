"""The report as data: frozen, complete, versioned. Text, JSON and HTML are made from it."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from recfx.errors import Diagnostic, plural
from recfx.inspect.table_report import TableReport
from recfx.replacement.conversion_record import Conversion


@dataclass(frozen=True)
class NodeReport:
    """One node of a collection's graph: see :class:`recfx.ir.NodeMeta`. ``shape`` and ``bytes`` are symbolic."""

    name: str
    kind: str
    tables: tuple[str, ...]
    made_by: str
    shape: tuple[sympy.Expr, ...]
    dtype: str
    bytes: sympy.Expr
    device: str
    kernel: str


@dataclass(frozen=True, repr=False)
class CollectionReport:
    """One collection.

    Args:
        paths: every fully qualified name it has; ``""`` is the root.
        kind: name of its class before conversion.
        status: ``"converted"``, ``"convertible"`` (before conversion), ``"kept"`` or ``"refused"``.
        why: the reason why it is kept or refused; None if it is neither.
        found: ``"traced"`` (a call of it was seen), ``"walked"`` (calls were not traced, or could not be), or
            ``"never called"``.
        file: where the user's code calls it, or where the class that holds it is defined; ``""`` if unknown.
        line: the line in that file; 0 if unknown.
        is_weighted: whether batches carry per-id weights; None if the collection does not say.
        device: as the collection states it.
        tables: its tables, in order.
        nodes: the nodes of the final graph.
        graph: the final graph as text; ``""`` if it is not converted.
        declined: what passes and backends did not do, and why.
        reasons: the reasons among :attr:`Report.reasons` that are about it or its tables.
    """

    paths: tuple[str, ...]
    kind: str
    status: str
    why: Diagnostic | None = None
    found: str = "walked"
    file: str = ""
    line: int = 0
    is_weighted: bool | None = None
    device: str = ""
    tables: tuple[TableReport, ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    graph: str = ""
    declined: tuple[Diagnostic, ...] = ()
    reasons: tuple[Diagnostic, ...] = ()

    def __repr__(self) -> str:
        return f"CollectionReport({self.path!r}, {self.kind}, {self.status}, {plural(len(self.tables), 'table')})"

    @property
    def path(self) -> str:
        """The first name."""
        return self.paths[0]

    @property
    def reason(self) -> str:
        """Reason code if it is kept or refused; otherwise ``""``."""
        return "" if self.why is None else self.why.code


REPORT_VERSION = "3"


@dataclass(frozen=True)
class Verification:
    """What the conversion compared: if no comparison was run, ``ok`` is None and ``text`` says why."""

    ok: bool | None
    text: str

    @classmethod
    def of(cls, conversion: Conversion) -> Verification:
        """What a conversion has compared, if it did; that nothing could be compared is no difference."""
        comparison = conversion.verification
        assert comparison is not None
        return cls(comparison.ok if comparison.ok or comparison.of("different") else None, str(comparison))


@dataclass(frozen=True)
class ReportData:
    """Everything that a :class:`recfx.inspect.report.Report` shows.

    Args:
        version: the version of this schema; it changes when a field changes its meaning or is removed.
        recfx_version: the version that made the report.
        torch_version: the version that it ran under.
        torchrec_version: the version that it ran under.
        ok: False if any reason is an error: a collection is refused, the model has no collection, or verification
            failed.
        collections: every collection, converted or not, in the order of the model.
        reasons: everything worth knowing, errors first.
        verification: what ``convert`` compared.
    """

    version: str
    recfx_version: str
    torch_version: str
    torchrec_version: str
    ok: bool
    collections: tuple[CollectionReport, ...]
    reasons: tuple[Diagnostic, ...]
    verification: Verification
