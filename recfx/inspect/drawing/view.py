"""The boxes and arrows of one step: what is collapsed is one box, and many like nodes are one stack."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
from recfx.ir.names import node_name

STACK_FROM = 6
"""So many like nodes of a collection are drawn as one stack."""

EXPANDED_UP_TO = 60
"""If there are more boxes than this, collections are drawn as one box each."""


LONGEST_LABEL = 60
"""Longer lines of a box, and longer labels, are cut in the middle."""


@dataclass
class Box:
    """One box.

    Args:
        name: unique in the view.
        lines: its text.
        stage: gives the colour.
        cluster: the collection around it, by the name of its call; ``""`` for none.
    """

    name: str
    lines: tuple[str, ...]
    stage: str
    cluster: str = ""


@dataclass
class View:
    """What is drawn.

    Args:
        boxes: by name.
        arrows: from box to box, with a label.
        clusters: the title of each collection that is not collapsed, by the name of its call.
        lone: the first and the last box of each collection that is not collapsed and that no arrow reaches.
    """

    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: dict[tuple[str, str], str] = field(default_factory=dict)
    clusters: dict[str, str] = field(default_factory=dict)
    lone: list[tuple[str, str]] = field(default_factory=list)

    def add(self, box: Box) -> None:
        self.boxes[box.name] = box

    def columns(self) -> list[tuple[str, str]]:
        """What no arrow reaches would all stand side by side: invisible arrows that put it into columns."""
        reached = {name for arrow in self.arrows for name in arrow}
        boxes = [(name, name) for name, box in self.boxes.items() if not box.cluster and name not in reached]
        found = []
        for alone, height in ((boxes, 3.0), (self.lone, 0.4)):
            across = max(2, round((len(alone) / height) ** 0.5))
            found += [(above[1], below[0]) for above, below in zip(alone, alone[across:], strict=False)]
        return found


def view_of(drawing: Drawing, step: str) -> View:
    """The view of one step. Collections are collapsed if there would be too many boxes otherwise."""
    expanded = _View(drawing, step, collapse=False).view
    return expanded if len(expanded.boxes) <= EXPANDED_UP_TO else _View(drawing, step, collapse=True).view


class _View:
    def __init__(self, drawing: Drawing, step: str, collapse: bool) -> None:
        self.drawing, self.step, self.collapse = drawing, step, collapse
        self.view = View()
        self.takers: dict[str, list[str]] = {}  # the boxes that take the inputs of a call
        self.givers: dict[str, tuple[str, str]] = {}  # the box that gives a call's value, and the value's shape
        stack_of = _outer_stacks(drawing.nodes)
        for node in drawing.nodes:
            if node.kind == CALL:
                self.add_call(node)
            elif node.name in stack_of:
                first, count = stack_of[node.name]
                self.givers[node.name], self.takers[node.name] = (first, ""), [first]
                if node.name == first:
                    self.view.add(Box(first, (_count(count, _short(node), times=True),), node.stage))
            else:
                self.view.add(Box(node.name, (_short(node),), node.stage))
        for node in drawing.nodes:
            for source in node.inputs:
                tail, label = self.givers.get(source, (source, ""))
                for head in self.takers.get(node.name, [node.name]):
                    self.view.arrows.setdefault((tail, head), label)

    def add_call(self, call: DrawnNode) -> None:
        one = self.drawing.collections[call.collection]
        found = one.at(self.step, self.drawing.steps)
        if found is None or self.collapse or not found.nodes:
            lines = [one.label, _count(len(one.tables), "table")]
            if found is None:
                lines.insert(0, one.was)
            else:
                lines.append(_count(sum(node.kind != ITEM for node in found.nodes), "node"))
            self.view.add(Box(call.name, tuple(lines), "lookup"))
            self.givers[call.name] = (call.name, one.shape)
            return
        self.view.clusters[call.name] = one.label
        self.add_nodes(call, one, found)

    def add_nodes(self, call: DrawnNode, one: DrawnCollection, step: DrawnStep) -> None:
        items = {node.name: node for node in step.nodes if node.kind == ITEM}
        box_of = _stacks(call.name, step)
        for node in step.nodes:
            if node.kind == ITEM:
                continue
            name, count = box_of[node.name]
            first = _count(count, node.kind, times=True)
            lines = [first, _count(len(node.tables), "table")] if count == 1 else [first]
            if node.kernel:
                lines.append(f"kernel {node.kernel}")
            if name not in self.view.boxes:
                self.view.add(Box(name, tuple(lines), node.stage, call.name))
        lone = not call.inputs and not any(call.name in other.inputs for other in self.drawing.nodes)
        entry = f"{call.name}/{step.input}"
        if lone:
            self.view.add(Box(entry, ("features",), "io", call.name))
        shapes = {node.name: node.shape for node in step.nodes}
        for node in step.nodes:
            if node.kind == ITEM:
                continue
            head = box_of[node.name][0]
            for given in node.inputs:
                source, label = given, ""
                if given in items:
                    source, label = items[given].inputs[0], _item_label(items[given], one)
                if source == step.input:
                    self.takers.setdefault(call.name, []).append(head)
                    if lone:
                        self.view.arrows.setdefault((entry, head), "")
                else:
                    self.view.arrows.setdefault((box_of[source][0], head), label or shapes.get(source, ""))
        self.takers[call.name] = list(dict.fromkeys(self.takers.get(call.name, ())))
        if step.giver in box_of:
            self.givers[call.name] = (box_of[step.giver][0], shapes.get(step.giver, ""))
        if lone and step.giver in box_of:
            leave = f"{call.name}/output"
            self.view.add(Box(leave, ("KeyedTensor",), "io", call.name))
            self.view.arrows[(box_of[step.giver][0], leave)] = shapes.get(step.giver, "")
            self.view.lone.append((entry, leave))


def _outer_stacks(nodes: tuple[DrawnNode, ...]) -> dict[str, tuple[str, int]]:
    """For nodes of the model that do alike things with the same inputs, such as to take out one feature each: the first
    of them, and how many they are.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        if node.kind == DENSE:
            groups.setdefault((re.sub(r"'[^']*'|\d+", "", _short(node)), *node.inputs), []).append(node.name)
    return {name: (names[0], len(names)) for names in groups.values() if len(names) >= STACK_FROM for name in names}


def _stacks(call: str, step: DrawnStep) -> dict[str, tuple[str, int]]:
    """The box of each node, and how many nodes are in it."""
    groups: dict[tuple[str, str], list[str]] = {}
    for node in step.nodes:
        if node.kind != ITEM:
            groups.setdefault((node.kind, node.kernel), []).append(node.name)
    return {
        name: (f"{call}/{names[0]}", len(names)) if len(names) >= STACK_FROM else (f"{call}/{name}", 1)
        for names in groups.values()
        for name in names
    }


def _short(node: DrawnNode) -> str:
    if node.kind in (INPUT, OUTPUT):
        return node.name if node.kind == INPUT else "output"
    called = node.line.partition(" = ")[2].partition("(")[0]
    return re.sub(r"^call_\w+\[(.*)\]$", r"\1", called) or node.name


def _item_label(item: DrawnNode, one: DrawnCollection) -> str:
    return item.name.removeprefix(node_name(one.path, ""))


def _count(number: int, word: str, times: bool = False) -> str:
    if times:
        return word if number == 1 else f"{number:,} x {word}"
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def cut(text: str) -> str:
    """A line that is no longer than a box should be."""
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 10]}…{text[-9:]}"
