"""Names that a file can have: a saved program is code, so every module and tensor in it needs an identifier."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn


def flat_graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module that has what the graph uses, under its full path with underscores, and nothing else.

    Args:
        root: has what the graph names.
        graph: a graph, whose targets are renamed.
    """
    used: dict[str, Any] = {}
    names: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            path = str(node.target)
            if path not in names:
                names[path] = identifier(path, used)
                used[names[path]] = _found(root, path)
            node.target = names[path]
    graph_module = fx.GraphModule(used, graph)
    for name, value in used.items():
        if (
            isinstance(value, torch.Tensor)
            and not isinstance(value, nn.Parameter)
            and name not in graph_module._buffers
        ):
            graph_module.__dict__.pop(name, None)
            graph_module.register_buffer(name, value)
    return graph_module


def identifier(path: str, taken: Collection[str]) -> str:
    """A readable identifier for a path, different from those that are taken."""
    wanted = re.sub(r"\W", "_", path, flags=re.ASCII)
    if not wanted or wanted[0].isdigit() or keyword.iskeyword(wanted):
        wanted = f"module_{wanted}"
    found, number = wanted, 1
    while found in taken:
        found, number = f"{wanted}_{number}", number + 1
    return found


def _found(root: nn.Module, path: str) -> Any:
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value
