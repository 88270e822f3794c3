"""Numbers and expressions as text for a terminal, and data for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import sympy

_MOST_TERMS = 6
_MOST_LENGTHS = 8
_MOST_UNLIKE_1 = 32
"""How many lengths are named, and how many if so many are not 1."""


def in_time(seconds: float) -> str:
    """A time in the unit that fits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def step_text(trains: bool, hardware: str, batch: int, lengths: Mapping[str, float], world_size: int) -> str:
    """The step that a time is predicted for; every time is shown beside it."""
    kind, per_rank = "training step" if trains else "step in eval mode", " per rank" if world_size > 1 else ""
    return f"{kind} on {hardware}, B={batch}{per_rank}, L: {lengths_text(lengths, True)}"


def lengths_text(lengths: Mapping[str, float], are_all: bool) -> str:
    """``2.5``, or ``user=1, watched=50``."""
    if are_all and len(set(lengths.values())) == 1:
        return f"{round(next(iter(lengths.values())), 3):g}"
    rounded = sorted(
        ((name, round(length, 3)) for name, length in lengths.items()), key=lambda named_length: named_length[1] == 1
    )
    most = max(_MOST_LENGTHS, min(sum(length != 1 for _, length in rounded), _MOST_UNLIKE_1))
    shown, rest = [f"{name}={length:g}" for name, length in rounded[:most]], [length for _, length in rounded[most:]]
    if unlike := [length for length in rest if length != 1]:
        shown.append(f"{len(unlike)} more of {min(unlike):g} to {max(unlike):g}")
    if ones := len(rest) - len(unlike):
        shown.append(f"and {ones} of 1")
    return ", ".join(shown)


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
