"""Numbers and expressions as text for a terminal, and data for JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import sympy

_MOST_TERMS, _MOST_LENGTHS = 4, 8


def in_time(seconds: float) -> str:
    """A time in the unit that fits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def step_text(trains: bool, hardware: str, batch: int, lengths: Mapping[str, float], world_size: int) -> str:
    """The step that a time is predicted for, which is shown beside it; lengths as ``2.5`` or ``user=1, watched=50``."""
    kind, per_rank = "training step" if trains else "step in eval mode", " per rank" if world_size > 1 else ""
    shown = [
        f"{name}={round(length, 3):g}" for name, length in sorted(lengths.items(), key=lambda named: named[1] == 1)
    ]
    if len(set(lengths.values())) == 1:
        shown = [f"{round(next(iter(lengths.values())), 3):g}"]
    more = [f"and {len(shown) - _MOST_LENGTHS} more"] if len(shown) > _MOST_LENGTHS else []
    return f"{kind} on {hardware}, B={batch}{per_rank}, L: {', '.join([*shown[:_MOST_LENGTHS], *more])}"


def expression(value: sympy.Expr) -> str:
    """A symbolic size; a sum over the lengths of many features is shortened: ``8*B*(L_f0 + 25 more)``."""
    lengths = sorted((symbol for symbol in value.free_symbols if symbol.name.startswith("L_")), key=str)
    if len(lengths) <= _MOST_TERMS:
        return str(value)
    first = lengths[0]
    shown = str(value.xreplace(dict.fromkeys(lengths[1:], sympy.Integer(0))))
    return re.sub(rf"(?<!\w){re.escape(first.name)}(?!\w)", lambda _: f"({first} + {len(lengths) - 1:,} more)", shown)


def plain(value: Any) -> Any:
    """Dicts, lists and scalars."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, sympy.Basic) else value
