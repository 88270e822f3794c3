"""The report as data: frozen, complete, versioned. Text, JSON and HTML are made from it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import sympy

from recfx.diagnostics import Diagnostic
from recfx.inspect.report_json import plain
from recfx.inspect.table_report import TableReport

REPORT_VERSION = "1"


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


@dataclass(frozen=True)
class PassReport:
    """One pass: whether it changed the graph, and the graph after it as text."""

    name: str
    modified: bool
    graph: str


@dataclass(frozen=True)
class CollectionReport:
    """One collection.

    Args:
        paths: every fully qualified name it has; ``""`` is the root.
        kind: name of its class before conversion.
        status: ``"converted"``, ``"convertible"`` (before conversion), ``"kept"`` or ``"refused"``.
        reason: reason code of what is kept or refused.
        message: why.
        what_to_do: what the user can change.
        found: ``"traced"`` (a call of it was seen), ``"walked"`` (nobody looked, or the trace could not), or
            ``"never called"``.
        file: where the user's code calls it, or the class that holds it; ``""`` if unknown.
        line: in that file; 0 if unknown.
        is_weighted: whether batches carry per-id weights; None where the collection does not say.
        device: as the collection says it.
        tables: in order.
        nodes: of the final graph.
        passes: in the order in which they ran.
        declined: what passes and backends did not do, and why.
        reasons: those of :attr:`Report.reasons` that are about it, its tables included.
    """

    paths: tuple[str, ...]
    kind: str
    status: str
    reason: str = ""
    message: str = ""
    what_to_do: str = ""
    found: str = "walked"
    file: str = ""
    line: int = 0
    is_weighted: bool | None = None
    device: str = ""
    tables: tuple[TableReport, ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    passes: tuple[PassReport, ...] = ()
    declined: tuple[Diagnostic, ...] = ()
    reasons: tuple[Diagnostic, ...] = ()

    @property
    def path(self) -> str:
        """The first name."""
        return self.paths[0]


@dataclass(frozen=True)
class Verification:
    """What the conversion compared: ``ok`` is None where it was not run, and ``text`` says why."""

    ok: bool | None
    text: str


@dataclass(frozen=True)
class Report:
    """What was done to a model, or would be. ``str()`` for a terminal.

    Args:
        version: of this schema; changes when a field changes its meaning or goes.
        recfx_version: that made the report.
        torch_version: that it ran under.
        torchrec_version: that it ran under.
        ok: False if any reason is an error: a collection is refused, there is none, or verification failed.
        collections: every one, converted or not, in the order of the model.
        reasons: everything worth knowing, errors first.
        rollbacks: modules that the trace could not enter.
        verification: what ``convert`` compared.
        notes: those of ``reasons`` that the conversion itself wrote down.
    """

    version: str
    recfx_version: str
    torch_version: str
    torchrec_version: str
    ok: bool
    collections: tuple[CollectionReport, ...]
    reasons: tuple[Diagnostic, ...]
    rollbacks: tuple[Diagnostic, ...]
    verification: Verification
    notes: tuple[Diagnostic, ...] = ()

    def __str__(self) -> str:
        from recfx.inspect.text import render_text

        return render_text(self)

    def to_json(self) -> str:
        """Everything, keys in the order of the fields; symbolic sizes as text."""
        return json.dumps(plain(self), indent=2)

    def to_html(self) -> str:
        """One page that needs no other file."""
        from recfx.inspect.html import render_html

        return render_html(self)
