"""Short words for names, places, counts and symbolic expressions, in text and in pages."""

from __future__ import annotations

from pathlib import Path

import sympy

from recfx.errors import below_current, printable
from recfx.planner.pricing.cost_text import expression


def name_of(path: str) -> str:
    """A fully qualified name, or a word for the root, whose name is empty."""
    return printable(path) or "(root)"


def place_of(name: str, line: int) -> str:
    """``file:line``, without well-known folders."""
    file = Path(name)
    if "site-packages" in file.parts:
        file = Path(*file.parts[file.parts.index("site-packages") + 1 :])
    return f"{below_current(file)}:{line}"


def shape(sizes: tuple[sympy.Expr, ...]) -> str:
    """``[B, 16]``."""
    return f"[{', '.join(expression(value) for value in sizes)}]"
