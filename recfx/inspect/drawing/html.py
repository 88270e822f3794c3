"""A drawing as one HTML page that needs no other file and no network: the data, and a script that draws it."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import re
from html import escape
from typing import Any

from recfx.inspect import wording
from recfx.inspect.drawing.assets import read, viz_js
from recfx.inspect.drawing.drawing import Drawing, DrawnCollection, DrawnNode, DrawnStep, DrawnTable
from recfx.inspect.drawing.view import EXPANDED_UP_TO, LONGEST_LABEL, STACK_FROM
from recfx.ir.meta import Collective, SourceLocation
from recfx.ir.names import node_name, printable
from recfx.planner.pricing.values import BATCH_SIZE, LENGTH


def render_html(drawing: Drawing) -> str:
    """The whole page. Everything from the model is data, which the page's script shows as text."""
    parts = {
        "TITLE": escape(printable(drawing.title)),
        "SUBTITLE": escape(printable(drawing.subtitle)),
        "STYLE": read("page.css"),
        "DATA": _packed(_Records().page(drawing)),
        "ENGINE": viz_js(),
        "SCRIPT": read("page.js"),
    }
    page = read("page.html")
    for name in parts:
        assert f"<!--{name}-->" in page, name
    # One pass over the template: nothing that was filled in is looked at again.
    return re.sub(r"<!--([A-Z]+)-->", lambda mark: parts[mark[1]], page)


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
    return [_readable(each) for each in data] if isinstance(data, (list, tuple)) else data


class _Records:
    """Each node once, however many steps it is the same in."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.places: dict[tuple[int, DrawnNode], int] = {}
        self.sources: dict[SourceLocation, str] = {}

    def page(self, drawing: Drawing) -> dict[str, Any]:
        collections = [self.collection(number, one) for number, one in enumerate(drawing.collections)]
        outer = [self.record(-1, node, {}) for node in drawing.nodes]
        return {
            "title": drawing.title,
            "steps": drawing.steps,
            "stackFrom": STACK_FROM,
            "expandedUpTo": EXPANDED_UP_TO,
            "longest": LONGEST_LABEL,
            "nodes": self.nodes,
            "outer": outer,
            "collections": collections,
            "costs": _costs(drawing),
        }

    def collection(self, number: int, one: DrawnCollection) -> dict[str, Any]:
        positions = {table.name: position for position, table in enumerate(one.tables)}
        return {
            "paths": one.paths,
            "prefix": node_name(one.path, ""),
            "kind": one.kind,
            "was": one.was,
            "shape": one.shape,
            "status": one.status,
            "why": one.why,
            "device": one.device,
            "sources": [_place(source) for source in one.sources],
            "tables": [_table(table) for table in one.tables],
            "steps": [self.step(number, step, positions) for step in one.steps],
        }

    def step(self, number: int, step: DrawnStep, positions: dict[str, int]) -> dict[str, Any]:
        return {
            "name": step.name,
            "modified": step.modified,
            "nodes": [self.record(number, node, positions) for node in step.nodes],
            "giver": step.giver,
            "input": step.input,
            "declined": step.declined,
        }

    def record(self, number: int, node: DrawnNode, positions: dict[str, int]) -> int:
        key = (number, node)
        if key not in self.places:
            self.places[key] = len(self.nodes)
            self.nodes.append(_node(node, positions) | self.source(node.source))
        return self.places[key]

    def source(self, source: SourceLocation | None) -> dict[str, str]:
        if source is None:
            return {}
        if source not in self.sources:
            self.sources[source] = _place(source)
        return {"source": self.sources[source]}


def _node(node: DrawnNode, positions: dict[str, int]) -> dict[str, Any]:
    """The fields that say something, but the source."""
    names = [each.name for each in dataclasses.fields(node) if each.name not in ("source", "collection")]
    fields: dict[str, Any] = {name: getattr(node, name) for name in names}
    fields["stage"] = node.stage
    fields["collectives"] = [_collective(each) for each in node.collectives]
    # A shard is called after its table.
    fields["tables"] = [
        positions.get(name, positions.get(name.rpartition("@")[0], -1)) for name in node.tables
    ]  # fmt: skip
    if node.collection >= 0:
        fields["collection"] = node.collection
    if node.cost < 0:
        del fields["cost"]
    if len(node.line) > 500:
        fields["line"] = f"{node.line[:400]} ... {node.line[-80:]}"
    return {name: value for name, value in fields.items() if value not in ("", (), [])}


def _costs(drawing: Drawing) -> dict[str, Any]:
    costs = drawing.costs
    positions = {path: place for place, one in enumerate(drawing.collections) for path in one.paths}
    return {
        "nodes": [
            {
                "collection": positions.get(collection, -1),
                "amounts": [[amount.name, amount.text, amount.formula] for amount in amounts],
            }
            for collection, amounts in costs.nodes
        ],
        "features": costs.features,
        "W": costs.world_size,
        "B": BATCH_SIZE,
        "L": LENGTH,
        "trains": costs.trains,
        "hardware": costs.hardware,
        "noTimes": costs.no_times,
    }


def _place(source: SourceLocation) -> str:
    place = wording.place_of(source.file, source.line)
    return place if source.called_from is None else f"{place}, called from {_place(source.called_from)}"


def _collective(one: Collective) -> str:
    return f"{one.operation} of {wording.expression(one.bytes)} bytes{', in the backward' if one.backward else ''}"


def _table(table: DrawnTable) -> list[Any]:
    return [table.name, table.features, table.rows, table.dim, table.pooling, table.dtype, table.hashing]
