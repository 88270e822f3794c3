"""Short words for names, places, counts and symbolic expressions, in text and in pages."""

from __future__ import annotations

import re
from pathlib import Path

import sympy

from recfx.errors import below_current, printable

_MOST_TERMS = 4


def name_of(path: str) -> str:
    """A fully qualified name, or a word for the root, whose name is empty."""
    return printable(path) or "(root)"


def place_of(name: str, line: int) -> str:
    """``file:line``, without well-known folders."""
    file = Path(name)
    if "site-packages" in file.parts:
        file = Path(*file.parts[file.parts.index("site-packages") + 1 :])
    return f"{below_current(file)}:{line}"


def expression(value: sympy.Expr) -> str:
    """A symbolic size; a sum over the lengths of many features is shortened: ``8*B*(L_f0 + 25 more)``."""
    lengths = sorted((symbol for symbol in value.free_symbols if symbol.name.startswith("L_")), key=str)
    if len(lengths) <= _MOST_TERMS:
        return str(value)
    first = lengths[0]
    shown = str(value.xreplace(dict.fromkeys(lengths[1:], sympy.Integer(0))))
    return re.sub(rf"(?<!\w){re.escape(first.name)}(?!\w)", lambda _: f"({first} + {len(lengths) - 1:,} more)", shown)


def shape(sizes: tuple[sympy.Expr, ...]) -> str:
    """``[B, 16]``."""
    return f"[{', '.join(expression(value) for value in sizes)}]"
