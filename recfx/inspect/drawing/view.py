"""The boxes and arrows of one step: what is collapsed is one box, and many like nodes are one stack.

The script of the page makes the same ones, in which collections and stacks open and close.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from recfx.errors import plural
from recfx.inspect.drawing.drawing import (
    CALL,
    DENSE,
    INPUT,
    ITEM,
    OUTPUT,
    Drawing,
    DrawnCollection,
    DrawnNode,
    DrawnStep,
)
from recfx.ir.snapshot import BEFORE
from recfx.printing.grid import groups_of

STACK_FROM = 6
"""From this number on, like nodes of a collection are drawn as one stack."""
EXPANDED_UP_TO = 60
"""If there are more boxes than this, collections are drawn as one box each."""
LONGEST_LABEL = 60
"""Longer lines of a box, and longer labels, are cut in the middle."""


@dataclass(frozen=True)
class Box:
    """One box."""

    name: str
    lines: tuple[str, ...]
    stage: str  # gives the colour
    cluster: str = ""  # the collection around it, by the name of its call


class View:
    """What is drawn of one step; if it is collapsed, each collection is one box."""

    def __init__(self, drawing: Drawing, step: str, collapse: bool) -> None:
        self.boxes: dict[str, Box] = {}
        self.arrows: dict[tuple[str, str], str] = {}  # from box to box, with a label
        self.clusters: dict[str, str] = {}  # titles of collections that are not collapsed, by the names of their calls
        self._lone: list[tuple[str, str]] = []  # the first and the last box of each cluster that no arrow reaches
        self._takers: dict[str, list[str]] = {}  # the boxes that take the inputs of a call
        self._givers: dict[str, tuple[str, str]] = {}  # the box that gives a call's value, and the value's shape
        stack_of = _outer_stacks(drawing.nodes)
        for node in drawing.nodes:
            if node.kind == CALL:
                self._add_call(drawing, node, step, collapse)
            elif node.name in stack_of:
                first, count = stack_of[node.name]
                self._givers[node.name], self._takers[node.name] = (first, ""), [first]
                if node.name == first:
                    self._add(first, (_times(count, _short(node)),), node.stage)
            else:
                self._add(node.name, (_short(node),), node.stage)
        for node in drawing.nodes:
            for source in node.inputs:
                tail, label = self._givers.get(source, (source, ""))
                for head in self._takers.get(node.name, [node.name]):
                    self.arrows.setdefault((tail, head), label)

    def columns(self) -> list[tuple[str, str]]:
        """Invisible arrows that put what no arrow reaches into columns; otherwise, it would all stand side by side."""
        reached = {name for arrow in self.arrows for name in arrow}
        boxes = [(name, name) for name, box in self.boxes.items() if not box.cluster and name not in reached]
        arrows = []
        for alone, height in ((boxes, 3.0), (self._lone, 0.4)):
            across = max(2, round((len(alone) / height) ** 0.5))
            arrows += [(above[1], below[0]) for above, below in zip(alone, alone[across:], strict=False)]
        return arrows

    def _add(self, name: str, lines: tuple[str, ...], stage: str, cluster: str = "") -> None:
        self.boxes.setdefault(name, Box(name, lines, stage, cluster))

    def _add_call(self, drawing: Drawing, call: DrawnNode, step: str, collapse: bool) -> None:
        collection = drawing.collections[call.collection]
        graph = collection.at(step, drawing.steps)
        tables = plural(len(collection.tables), "table")
        if graph is not None and graph.nodes and not collapse:
            self.clusters[call.name] = collection.label
            lone = not call.inputs and not any(call.name in node.inputs for node in drawing.nodes)
            self._add_nodes(call, collection, graph, lone)
            return
        stage = "lookup"
        lines: tuple[str, ...] = (collection.was, collection.label, tables)
        if graph is not None:
            lines = (collection.label, tables, plural(sum(node.kind != ITEM for node in graph.nodes), "node"))
        elif step != BEFORE:
            stage, lines = "kept", (*lines, "kept as it is")
        self._add(call.name, lines, stage)
        self._givers[call.name] = (call.name, collection.shape)

    def _add_nodes(self, call: DrawnNode, collection: DrawnCollection, graph: DrawnStep, lone: bool) -> None:
        """The nodes of a collection; if it is alone, with a box for what it takes and one for what it gives."""
        items = {node.name: node for node in graph.nodes if node.kind == ITEM}
        nodes = [node for node in graph.nodes if node.kind != ITEM]
        box_of = _stacks(call.name, nodes)
        for node in nodes:
            name, count = box_of[node.name]
            tables = (plural(len(node.tables), "table"),) if count == 1 else ()
            kernel = (f"kernel {node.kernel}",) if node.kernel else ()
            self._add(name, (_times(count, node.kind), *tables, *kernel), node.stage, call.name)
        entry, leave = f"{call.name}/{graph.input}", f"{call.name}/output"
        if lone:
            self._add(entry, ("features",), "io", call.name)
        shapes = {node.name: node.shape for node in nodes}
        takers = []
        for node in nodes:
            head = box_of[node.name][0]
            for taken in node.inputs:
                source = items[taken].inputs[0] if taken in items else taken
                if source == graph.input:
                    takers.append(head)
                    if lone:
                        self.arrows.setdefault((entry, head), "")
                else:
                    item = taken.removeprefix(collection.prefix) if taken in items else ""
                    self.arrows.setdefault((box_of[source][0], head), item or shapes.get(source, ""))
        self._takers[call.name] = list(dict.fromkeys(takers))
        if graph.giver not in box_of:
            return
        giver, shape = box_of[graph.giver][0], shapes.get(graph.giver, "")
        self._givers[call.name] = (giver, shape)
        if lone:
            self._add(leave, (collection.gives,), "io", call.name)
            self.arrows[giver, leave] = shape
            self._lone.append((entry, leave))


def view_of(drawing: Drawing, step: str) -> View:
    """The view of one step. Collections are collapsed if there would be too many boxes otherwise."""
    expanded = View(drawing, step, collapse=False)
    return expanded if len(expanded.boxes) <= EXPANDED_UP_TO else View(drawing, step, collapse=True)


def _outer_stacks(nodes: tuple[DrawnNode, ...]) -> dict[str, tuple[str, int]]:
    """For nodes of the model that do the same with the same inputs, such as taking out one feature each: the first of
    them, and how many there are.
    """
    dense = [node for node in nodes if node.kind == DENSE]
    alike = groups_of(dense, lambda node: (re.sub(r"'[^']*'|\d+", "", _short(node)), *node.inputs))
    return {node.name: (group[0].name, len(group)) for group in alike if len(group) >= STACK_FROM for node in group}


def _stacks(call: str, nodes: list[DrawnNode]) -> dict[str, tuple[str, int]]:
    """The box of each node, and how many nodes are in it."""
    boxes: dict[str, tuple[str, int]] = {}
    for group in groups_of(nodes, lambda node: (node.kind, node.kernel)):
        stack = (f"{call}/{group[0].name}", len(group))
        boxes |= {node.name: stack if len(group) >= STACK_FROM else (f"{call}/{node.name}", 1) for node in group}
    return boxes


def _short(node: DrawnNode) -> str:
    if node.kind in (INPUT, OUTPUT):
        return node.name if node.kind == INPUT else "output"
    called = node.line.partition(" = ")[2].partition("(")[0]
    return re.sub(r"^call_\w+\[(.*)\]$", r"\1", called) or node.name


def _times(count: int, word: str) -> str:
    return word if count == 1 else f"{count:,} x {word}"


def cut(text: str) -> str:
    """A line that is no longer than a box should be."""
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 10]}…{text[-9:]}"
