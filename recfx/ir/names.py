"""The names of nodes."""

from __future__ import annotations

import re


def node_name(collection: str, kind: str) -> str:
    """``<collection fqn>_<node>``; ``ebc_<node>`` for a collection that is the root.

    What cannot stand in a Python name is replaced as torch.fx does, so that a node has one name everywhere.
    """
    name = re.sub(r"[^0-9a-zA-Z_]+", "_", f"{collection or 'ebc'}_{kind}")
    return f"_{name}" if name[0].isdigit() else name
