"""The names of nodes, and of whatever else stands in the text of a graph."""

from __future__ import annotations

import math
import re
from typing import Any

import torch


def node_name(collection: str, kind: str) -> str:
    """``<collection fqn>_<node>``; ``ebc_<node>`` for a collection that is the root.

    What cannot stand in a Python name is replaced as torch.fx does, so that a node has one name everywhere.
    """
    name = re.sub(r"[^0-9a-zA-Z_]+", "_", f"{collection or 'ebc'}_{kind}")
    return f"_{name}" if name[0].isdigit() else name


PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.@:/-]*")
"""Names that stand in the text of a graph without quotes."""

_DTYPES = {repr(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
WORDS: dict[str, Any] = {"True": True, "False": False, "inf": math.inf, "-inf": -math.inf, "nan": math.nan, **_DTYPES}
"""Values of attributes whose text is a word."""


def quoted(name: str) -> str:
    """A name as it stands in the text of a graph: in quotes, if it could not be read back otherwise."""
    return name if PLAIN.fullmatch(name) and name not in WORDS else repr(name)
