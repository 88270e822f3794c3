"""What a page holds."""

import base64
import gzip
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def data_of(path: Path) -> dict[str, Any]:
    packed = re.search(r'id="data">([^<]*)</script>', path.read_bytes().decode())
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def text_of(path: Path) -> str:
    """What is above the picture, and all data of a page, as text."""
    head = re.search(r"<header>.*?</p>", path.read_text(encoding="utf-8"), re.DOTALL)
    assert head is not None
    return head[0] + json.dumps(data_of(path), ensure_ascii=False)


def value_of(formula: Any, batch: int, ranks: int, lengths: list[float]) -> float:
    """The value of an expression of a page (see ``recfx.inspect.drawing.costs.formula``), as its script computes it."""
    if not isinstance(formula, list):
        return float({"B": batch, "W": ranks}.get(formula, formula))
    operation, *parts = formula
    if operation == "L":
        return lengths[parts[0]]
    return float(_OPERATIONS[operation]([value_of(part, batch, ranks, lengths) for part in parts]))


_OPERATIONS: dict[str, Callable[[list[float]], float]] = {
    "+": sum,
    "*": math.prod,
    "/": lambda parts: parts[0] / parts[1],
    "^": lambda parts: parts[0] ** parts[1],
    "min": min,
    "max": max,
}
