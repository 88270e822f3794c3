"""Costs as JSON: every class by its fields, in their order; expressions as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import sympy

from recfx.planner.pricing.cost_data import CostAtData, CostData

_FIELDS = ("version", "rank", "world_size", "trains", "device", "features", "nodes")


def cost_json(cost: CostData) -> str:
    """Indented."""
    return json.dumps({name: plain(getattr(cost, name)) for name in _FIELDS}, indent=2)


def cost_at_json(cost: CostAtData) -> str:
    """Indented, with the totals."""
    return json.dumps(plain(cost) | {"totals": plain(cost.totals)}, indent=2)


def plain(value: Any) -> Any:
    """Dicts, lists and scalars; fields that are functions are left out."""
    if hasattr(value, "_asdict"):
        return {key: plain(item) for key, item in value._asdict().items()}
    if is_dataclass(value):
        named = {each.name: getattr(value, each.name) for each in fields(value)}
        return {name: plain(found) for name, found in named.items() if not callable(found)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, sympy.Basic) else value
