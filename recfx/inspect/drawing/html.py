"""A drawing as one HTML page that needs no other file and no network: the data, and a script that draws it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html import escape
from typing import Any

from recfx.errors import printable
from recfx.inspect.drawing.assets import read

STACK_FROM = 6
"""From this number on, like nodes of a collection are drawn as one stack."""
EXPANDED_UP_TO = 60
"""If there are more boxes than this, collections are drawn as one box each."""
LONGEST_LABEL = 60
"""Longer lines of a box, and longer labels, are cut in the middle."""


def render_html(drawing: dict[str, Any], report: str = "") -> str:
    """The whole page of what ``collect`` returns; ``report`` is the address of the report's page.

    Everything from the model is data, which the page's script shows as text.
    """
    limits = {"stackFrom": STACK_FROM, "expandedUpTo": EXPANDED_UP_TO, "longest": LONGEST_LABEL}
    parts = {
        "TITLE": escape(printable(drawing["title"])),
        "SUBTITLE": escape(printable(drawing["subtitle"])),
        "STYLE": read("page.css"),
        "DATA": _packed(drawing | limits | {"report": report}),
        "ENGINE": read("viz-global.js"),
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
