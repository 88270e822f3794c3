"""The report as JSON: every class by its fields, in their order; symbolic sizes as text."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import sympy

from recfx.errors import Diagnostic
from recfx.inspect.collection_report import CollectionReport
from recfx.inspect.report_data import ReportData
from recfx.inspect.table_report import HashingReport

_REASON = {
    "code": "code",
    "module_path": "path",
    "message": "message",
    "what_to_do": "what_to_do",
    "severity": "severity",
}
_DECLINED = {"by": "by", "reason": "code", "message": "message", "node": "node"}
_ROLLBACK = {"module_path": "path", "reason": "code", "message": "message"}
_WHY = ("reason", "message", "what_to_do")  # of a collection: keys of the collection itself, not of a nested object

# How diagnostics are written in each field of the report that holds them: key -> attribute.
_KEYS = {
    "reasons": _REASON,
    "notes": _REASON,
    "declined": _DECLINED,
    "kernels_passed_over": _DECLINED,
    "rollbacks": _ROLLBACK,
}


def render_json(report: ReportData) -> str:
    """The whole report, indented."""
    return json.dumps(plain(report), indent=2)


def plain(value: Any, field: str = "") -> Any:
    """Convert to dicts, lists and scalars.

    Args:
        value: the report, or a part of it.
        field: the field of the report that holds the value.
    """
    if isinstance(value, Diagnostic):
        return {key: getattr(value, attribute) for key, attribute in _KEYS[field].items()}
    if is_dataclass(value):
        names = [each.name for each in fields(ReportData if isinstance(value, ReportData) else value)]
        if isinstance(value, CollectionReport):
            names[names.index("why") : names.index("why") + 1] = _WHY
        found = {name: plain(getattr(value, name), name) for name in names}
        return found | {"counters": dict(value.counters)} if isinstance(value, HashingReport) else found
    if isinstance(value, tuple):
        return [plain(item, field) for item in value]
    return str(value) if isinstance(value, sympy.Basic) else value
