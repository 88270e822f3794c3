"""The names of nodes; and names as they can be printed, because a user may have put anything into one."""

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


def printable(text: str, keep: str = "") -> str:
    """The text in one line that changes no terminal and fits every encoding of Unicode.

    Line breaks, escape sequences, lone surrogates and marks without a width of their own become backslash escapes.
    The characters in ``keep`` stay as they are, such as line breaks that were not in a name.
    """
    if text.isprintable():  # nearly always
        return text
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in text
    )
