"""A drawing as text in Graphviz's DOT language, before and after, one beside the other; and as SVG, by Graphviz."""

from __future__ import annotations

import re
import shutil
import subprocess

from recfx.errors import DrawingError, printable
from recfx.inspect.drawing.drawing import Drawing
from recfx.inspect.drawing.view import Box, View, cut, view_of
from recfx.ir.snapshot import BEFORE

COLOURS = {
    "select": "#cfe3f5",
    "hash": "#f6dfb8",
    "dist": "#e3d3f1",
    "lookup": "#cdebd1",
    "dense": "#e4e4e4",
    "io": "#ffffff",
    "kept": "#ffffff",
}
"""The colour of each stage; black text is readable on all of them."""

_LONGEST = 120.0  # seconds that a layout may take


def render_dot(drawing: Drawing) -> str:
    """The text. Equal drawings give equal text."""
    lines = [
        f"digraph {_quoted(drawing.title)} {{",
        f"  label={_quoted(f'{drawing.title}: {drawing.subtitle}')}; labelloc=t; fontname=Helvetica; fontsize=12;",
        '  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=11, color="#555555"];',
        '  edge [fontname=Helvetica, fontsize=9, color="#555555"];',
    ]
    shown = [("before", BEFORE)]
    if drawing.converted:
        shown.append(("after", drawing.steps[-1]))
    for title, step in shown:
        lines += _side(title, view_of(drawing, step))
    return "\n".join([*lines, "}"]) + "\n"


def _side(title: str, view: View) -> list[str]:
    lines = [f"  subgraph {_quoted('cluster ' + title)} {{", f'    label={_quoted(title)}; color="#999999";']
    lines += [f"    {_box(title, box)}" for box in view.boxes.values() if not box.cluster]
    for call, label in view.clusters.items():
        lines.append(f"    subgraph {_quoted(f'cluster {title} {call}')} {{")
        lines.append(f'      label={_quoted(cut(label))}; color="#999999"; style=dashed;')
        lines += [f"      {_box(title, box)}" for box in view.boxes.values() if box.cluster == call]
        lines.append("    }")
    for (tail, head), label in view.arrows.items():
        shown = f" [label={_quoted(cut(label))}]" if label else ""
        lines.append(f"    {_quoted(f'{title} {tail}')} -> {_quoted(f'{title} {head}')}{shown};")
    for tail, head in view.columns():
        lines.append(f"    {_quoted(f'{title} {tail}')} -> {_quoted(f'{title} {head}')} [style=invis];")
    return [*lines, "  }"]


def _box(title: str, box: Box) -> str:
    text = "\\n".join(_escaped(cut(line)) for line in box.lines)
    return f'{_quoted(f"{title} {box.name}")} [label="{text}", fillcolor="{COLOURS[box.stage]}"];'


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    entities = re.sub(r"&(?=#?\w+;)", "&amp;", printable(text))  # Graphviz would read them
    return entities.replace("\\", "\\\\").replace('"', '\\"')


def render_svg(dot: str) -> str:
    """The picture that Graphviz's own program makes of DOT text.

    Raises:
        DrawingError: ``no_graphviz``, ``graphviz_failed``.
    """
    program = shutil.which("dot")
    if program is None:
        raise DrawingError(
            "an SVG file needs Graphviz's program dot, which is not on this machine.",
            reason="no_graphviz",
            what_to_do="install Graphviz (apt-get install graphviz), or draw a .html file, which needs nothing.",
        )
    try:
        done = subprocess.run(
            [program, "-Tsvg"], input=dot.encode(), capture_output=True, check=False, timeout=_LONGEST
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(str(error)) from error
    if done.returncode:
        raise _failed(done.stderr.decode(errors="replace").strip())
    return done.stdout.decode()


def _failed(why: str) -> DrawingError:
    return DrawingError(
        f"Graphviz could not lay out the graph: {why}",
        reason="graphviz_failed",
        what_to_do="draw a .html or .dot file, and please report this with the .dot file.",
    )
