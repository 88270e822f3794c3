"""Descriptions of tables of given dims; the first one has two features."""

from __future__ import annotations

from recfx.hashing import HashConfig
from recfx.ir import TableSpec


def specs_of(dims: list[int]) -> tuple[TableSpec, ...]:
    specs = []
    for table, dim in enumerate(dims):
        names = (f"f{table}", "again") if table == 0 else (f"f{table}",)
        adopted = HashConfig().resolve(7 + table, adopt=True)
        specs.append(TableSpec(f"t{table}", names, names, 7 + table, dim, "SUM", adopted, 0.0, 0.0))
    return tuple(specs)
