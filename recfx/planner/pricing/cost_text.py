"""Numbers and expressions as text for a terminal, and data for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import sympy

_MOST_TERMS = 6


def in_time(seconds: float) -> str:
    """A time in the unit that fits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def shortened(expression: sympy.Expr) -> str:
    """An expression, with only the first terms of sums of many."""
    return str(sympy.sympify(expression).replace(_is_long, lambda part: _cut(*part.args)))


def _is_long(part: sympy.Basic) -> bool:
    return bool(part.is_Add) and len(part.args) > _MOST_TERMS


def _cut(*terms: sympy.Expr) -> sympy.Expr:
    shown = " + ".join(str(term) for term in terms[:_MOST_TERMS])
    return sympy.Symbol(f"({shown} + {len(terms) - _MOST_TERMS} more)")


def plain(value: Any) -> Any:
    """Dicts, lists and scalars; fields that are functions are left out."""
    if hasattr(value, "_asdict"):
        return {key: plain(item) for key, item in value._asdict().items()}
    if is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: plain(item) for name, item in named.items() if not callable(item)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, sympy.Basic) else value
