"""Costs side by side: of several plans, or of several numbers of ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from recfx.planner.pricing.cost_data import CostAtData
from recfx.planner.pricing.cost_text import in_bytes, in_time, table

COMPARISON_VERSION = "1"


@dataclass(frozen=True)
class PlanRow:
    """One plan.

    Args:
        name: as given.
        types: the sharding type of every table, by ``<collection>.<table>``.
        cost: what it costs.
    """

    name: str
    types: Mapping[str, str]
    cost: CostAtData


@dataclass(frozen=True)
class PlanComparison:
    """Several plans for one model, in the order given. ``str()`` is a table for a terminal."""

    rows: tuple[PlanRow, ...]

    @property
    def best(self) -> PlanRow:
        """The plan with the shortest predicted step."""
        return min(self.rows, key=lambda row: row.cost.seconds)

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        best = self.best
        lines = [["", "plan", *_HEADS, "tables"]]
        for row in self.rows:
            counts = ", ".join(f"{count} {kind}" for kind, count in Counter(row.types.values()).most_common())
            lines.append(["*" if row is best else "", row.name, *_cells(row.cost), counts])
        return "\n".join([_heading(best.cost), *table(lines)])

    def to_json(self) -> str:
        """Every plan with its types and totals; keys are in a fixed order."""
        rows = [{"name": row.name, "types": dict(row.types), **_numbers(row.cost)} for row in self.rows]
        return json.dumps({"version": COMPARISON_VERSION, "best": self.best.name, "plans": rows}, indent=2)


@dataclass(frozen=True)
class Sweep:
    """One model on several numbers of ranks, each with the cheapest plan. ``str()`` is a table for a terminal."""

    rows: tuple[CostAtData, ...]

    def __iter__(self) -> Iterator[CostAtData]:
        return iter(self.rows)

    def __str__(self) -> str:
        lines = [list(_HEADS), *(_cells(row) for row in self.rows)]
        return "\n".join([_heading(self.rows[0]), *table(lines, left=0)])

    def to_json(self) -> str:
        """Every number of ranks with its totals; keys are in a fixed order."""
        rows = [_numbers(row) for row in self.rows]
        return json.dumps({"version": COMPARISON_VERSION, "sweep": rows}, indent=2)


_HEADS = ("ranks", "step", "ids", "tables", "output", "wire", "sent by a rank", "fullest rank", "imbalance")


def _heading(cost: CostAtData) -> str:
    return f"B={cost.batch} per rank, times predicted for {cost.hardware.name}"


def _numbers(cost: CostAtData) -> dict[str, object]:
    return {
        "world_size": cost.world_size,
        "seconds": cost.seconds,
        "parts": {} if cost.step is None else cost.step.parts,
        "wire_bytes": max(rank.wire_bytes for rank in cost.ranks),
        "resident_bytes": max(rank.resident_bytes for rank in cost.ranks),
        "imbalance": cost.imbalance,
    }


def _cells(cost: CostAtData) -> list[str]:
    parts = {} if cost.step is None else cost.step.parts
    return [
        str(cost.world_size),
        in_time(cost.seconds),
        *(in_time(parts[name]) if name in parts else "" for name in ("ids", "tables", "output", "wire")),
        in_bytes(max(rank.wire_bytes for rank in cost.ranks)),
        in_bytes(max(rank.resident_bytes for rank in cost.ranks)),
        f"{cost.imbalance:.2f}",
    ]
