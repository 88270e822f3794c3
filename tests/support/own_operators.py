"""Operators that a test declares are forgotten afterwards: the tables of kinds are those of the process."""

import contextlib
from collections.abc import Iterator
from typing import Any

from recfx.ir.node_kinds import NODE_KINDS
from recfx.planner.pricing.formulas import FORMULAS
from recfx.runtime.lower_graph import OWN_MAKERS


@contextlib.contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """What is declared inside is gone at the end."""
    tables: tuple[dict[str, Any], ...] = (NODE_KINDS, OWN_MAKERS, FORMULAS)
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, was in zip(tables, before, strict=True):
            table.clear()
            table.update(was)
