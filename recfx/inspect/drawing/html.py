"""A drawing as one HTML page that needs no other file and no network: the data, and a script that draws it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html import escape
from typing import Any

from recfx.errors import printable
from recfx.inspect.drawing.assets import read, viz_js
from recfx.inspect.drawing.drawing import Drawing
from recfx.inspect.drawing.shards import drawn_shards
from recfx.planner.pricing.work import LENGTH

STACK_FROM = 6
"""From this number on, like nodes of a collection are drawn as one stack."""
EXPANDED_UP_TO = 60
"""If there are more boxes than this, collections are drawn as one box each."""
LONGEST_LABEL = 60
"""Longer lines of a box, and longer labels, are cut in the middle."""


def render_html(drawing: Drawing) -> str:
    """The whole page. Everything from the model is data, which the page's script shows as text."""
    parts = {
        "TITLE": escape(printable(drawing.title)),
        "SUBTITLE": escape(printable(drawing.subtitle)),
        "STYLE": read("page.css"),
        "DATA": _packed(page_data(drawing)),
        "ENGINE": viz_js(),
        "SCRIPT": "\n".join(map(read, _SCRIPTS)),
    }
    page = read("page.html")
    for name in parts:
        assert f"<!--{name}-->" in page, name
    # One pass over the template: nothing that was filled in is looked at again.
    return re.sub(r"<!--([A-Z]+)-->", lambda mark: parts[mark[1]], page)


_SCRIPTS = (
    "facts.js",
    "costs.js",
    "view.js",
    "draw.js",
    "sizes.js",
    "bars.js",
    "keys.js",
    "details.js",
    "ranks.js",
    "search.js",
    "links.js",
    "list.js",
    "page.js",
)
"""The parts of the page's script, which is one scope; the last one starts it."""


def _packed(data: Any) -> str:
    """Compressed JSON as letters and digits, which may stand inside a script element whatever names the model has."""
    text = json.dumps(_readable(data), ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _readable(data: Any) -> Any:
    """Replace what cannot be read in each text: Graphviz ends a label at a zero byte, for example."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {name: _readable(value) for name, value in data.items()}
    return [_readable(item) for item in data] if isinstance(data, (list, tuple)) else data


def page_data(drawing: Drawing) -> dict[str, Any]:
    """What the script of the page reads."""
    return {
        "title": drawing.title,
        "report": drawing.report,
        "steps": drawing.steps,
        "stackFrom": STACK_FROM,
        "expandedUpTo": EXPANDED_UP_TO,
        "longest": LONGEST_LABEL,
        "nodes": drawing.nodes,
        "outer": drawing.outer,
        "collections": [
            one | {"paths": [drawing.names.get(path, path) for path in one["paths"]]} for one in drawing.collections
        ],
        "costs": _costs(drawing),
    }


def _costs(drawing: Drawing) -> dict[str, Any]:
    costs, cost = drawing.costs, drawing.costs.cost
    positions = {path: place for place, collection in enumerate(drawing.collections) for path in collection["paths"]}
    lengths = [(name, float(cost.known.lengths.get(name, LENGTH))) for name in cost.features]
    return {
        "nodes": [
            {"collection": positions.get(node.collection, -1), "amounts": amounts}
            for node, amounts in zip(cost.nodes, costs.amounts(), strict=True)
        ],
        "features": cost.features,
        "W": cost.world_size,
        "B": cost.known.batch,
        "L": LENGTH,
        "lengths": ", ".join([f"{LENGTH:g}", *(f"{name}={length:g}" for name, length in lengths if length != LENGTH)]),
        "trains": cost.trains,
        "hardware": cost.hardware.label if cost.nodes else "",
        "note": costs.note,
        "rank": cost.rank,
        "shards": [one | {"collection": positions.get(one["collection"], -1)} for one in drawn_shards(costs)],
    }
