"""What pages are made of: markup, style, script, and Graphviz compiled to WebAssembly (Viz.js, by Michael Daines).

``viz-global.js`` is a file of the npm package ``@viz-js/viz``; the licences of what is in it are beside it.
"""

from __future__ import annotations

import functools
from importlib.resources import files


@functools.cache
def read(name: str) -> str:
    """The text of a file in this folder, byte for byte."""
    return files(__package__).joinpath(name).read_bytes().decode()
