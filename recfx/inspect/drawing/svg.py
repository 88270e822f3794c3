"""DOT text to SVG, by Graphviz: the copy that pages carry, if mini-racer is installed, or else its own program."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from recfx.errors import DrawingError
from recfx.inspect.drawing.assets import viz_js

# What viz-global.js expects around it, as far as a layout needs it. V8 alone has none of this.
_SURROUNDINGS = """
globalThis.window = globalThis;
globalThis.location = { href: "" };
globalThis.performance = { now: () => 0 };
globalThis.URL = class { constructor(path) { this.href = path; } };
globalThis.crypto = { getRandomValues: (array) => array };
globalThis.TextDecoder = class {
  decode(bytes) {
    let text = "";
    for (const byte of bytes) text += String.fromCharCode(byte);
    return decodeURIComponent(escape(text));
  }
};
"""
_LONGEST = 120.0  # seconds


def render_svg(dot: str) -> str:
    """The picture that Graphviz makes of DOT text.

    Raises:
        DrawingError: ``no_graphviz``, ``graphviz_failed``.
    """
    try:
        from py_mini_racer import MiniRacer
    except ImportError:
        return _by_program(dot)
    return _by_engine(MiniRacer, dot)


def _by_engine(engine: Any, dot: str) -> str:
    context = engine()
    try:
        context.eval(_SURROUNDINGS)
        context.eval(viz_js())
        context.eval("Viz.instance().then((viz) => { globalThis.viz = viz; })").get(timeout=_LONGEST)
        found = context.eval(f"viz.renderString({json.dumps(dot)}, {{ format: 'svg' }})", timeout_sec=_LONGEST)
    except Exception as error:  # whatever the engine raises for an error of Graphviz's
        raise _failed(str(error)) from error
    finally:
        context.close()
    return str(found)


def _by_program(dot: str) -> str:
    program = shutil.which("dot")
    if program is None:
        raise DrawingError(
            "an SVG file needs Graphviz, which is not on this machine.",
            reason="no_graphviz",
            what_to_do="pip install mini-racer, which runs the copy of Graphviz that recfx has; or install Graphviz "
            "(apt-get install graphviz); or draw a .html or .dot file.",
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
