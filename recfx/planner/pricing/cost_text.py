"""Costs as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from recfx.planner.pricing.cost_data import CostAtData, CostData
from recfx.planner.pricing.node_price import NodePrice, Totals

_MOST_TERMS = 6


def cost_text(cost: CostData) -> str:
    """One line per node, with its expressions."""
    lines = [_where(cost.rank, cost.world_size) + f"{'training' if cost.trains else 'eval'} step"]
    for node in cost.nodes:
        lines.append(f"{node.name}  ({node.kind})")
        facts = {
            "reads": shortened(node.read_bytes),
            "writes": shortened(node.written_bytes),
            "flops": shortened(node.flops),
            "wire": shortened(node.wire_bytes),
            "resident": in_bytes(node.resident_bytes) if node.resident_bytes else "0",
        }
        lines += [f"  {name:<9}{value}" for name, value in facts.items() if value != "0"]
    lines.append(f"resident in all: {in_bytes(cost.resident_bytes)}; .at(B=..., L=...) gives numbers and times")
    return "\n".join(lines)


def cost_at_text(cost: CostAtData) -> str:
    """A table with one row per node, and the totals."""
    rows = [["node", "kind", "read", "written", "flops", "wire", "resident", "time"]]
    rows += [[node.name, node.kind, *_numbers(node)] for node in cost.nodes]
    rows.append(["total", "", *_numbers(cost.totals)])
    batch = f"B={cost.batch}" + (f" of {cost.batches}" if cost.batches else "")
    lines = [
        _where(cost.rank, cost.world_size)
        + f"{batch}, times predicted for {cost.hardware.name}; wire is what the rank passes to collectives"
    ]
    return "\n".join([*lines, *table(rows)])


def table(rows: Sequence[Sequence[str]], left: int = 2) -> list[str]:
    """Rows with columns of equal width; the first ``left`` columns begin at the left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def in_bytes(size: float) -> str:
    """A size in the unit that fits it."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def in_time(seconds: float) -> str:
    """A time in the unit that fits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def shortened(expression: sympy.Expr) -> str:
    """An expression, with only the first terms of sums of many."""
    found = sympy.sympify(expression)
    return str(found.replace(_is_long, lambda part: _cut(*part.args)) if found.has(sympy.Add) else found)


def _is_long(part: sympy.Basic) -> bool:
    return bool(part.is_Add) and len(part.args) > _MOST_TERMS


def _cut(*terms: sympy.Expr) -> sympy.Expr:
    shown = " + ".join(str(term) for term in terms[:_MOST_TERMS])
    return sympy.Symbol(f"({shown} + {len(terms) - _MOST_TERMS} more)")


def _where(rank: int, world_size: int) -> str:
    return "" if world_size == 1 else f"rank {rank} of {world_size}, "


def _numbers(node: NodePrice | Totals) -> list[str]:
    sizes = [in_bytes(node.read_bytes), in_bytes(node.written_bytes), f"{node.flops:.3g}"]
    return [*sizes, in_bytes(node.wire_bytes), in_bytes(node.resident_bytes), in_time(node.seconds)]
