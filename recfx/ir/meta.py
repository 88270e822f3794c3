"""Node metadata: ``node.meta["recfx"]`` says what a node is, how big its value is and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx, nn

META_KEY = "recfx"

CALL_KEY = "recfx_call"
"""Where the ``meta`` of a node in the graph of a model has the name and the target of the call that it stands for."""

BATCH = sympy.Symbol("B", positive=True, integer=True)
WORLD = sympy.Symbol("W", positive=True, integer=True)


def mean_length(feature: str) -> sympy.Symbol:
    """The symbol for a feature's mean number of ids per sample."""
    return sympy.Symbol(f"L_{feature}", nonnegative=True)


class Frozen:
    """What nothing edits, so that copies of a graph or of a model share it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


@dataclass(frozen=True)
class SourceLocation:
    """A line of the user's code."""

    file: str
    line: int
    called_from: SourceLocation | None = None  # if it is in an installed package, the line outside that led to it

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Collective:
    """One collective call of a node."""

    operation: str  # ``"all_to_all"``, ``"reduce_scatter"``, ``"all_gather"`` or ``"all_reduce"``
    bytes: sympy.Expr  # symbolic size of what this rank passes to the call, including its own part
    backward: bool = False  # whether the call runs in the backward
    ranks: int = 0  # how many ranks take part; 0 if all do
    across_hosts: bool = False  # whether each of these ranks is on a host of its own


@dataclass(frozen=True)
class NodeMeta(Frozen):
    """Facts about one node."""

    kind: str  # name of a declared node kind
    collection: str  # fully qualified name of the collection that it belongs to; ``""`` for a root
    shape: tuple[sympy.Expr, ...] = ()  # symbolic, in ``B``, ``W`` and ``L_<feature>``; for a KJT, the number of ids
    dtype: torch.dtype | None = None  # element type, if the value is a single tensor
    bytes: sympy.Expr = sympy.Integer(0)  # symbolic size of the value
    device: str = ""  # device type of the value, ``""`` if not known yet
    source: SourceLocation | None = None  # where the user's code creates the collection, if known
    tables: tuple[str, ...] = ()  # names of the tables that the node works on
    kernel: str = ""  # the backend that serves a lookup, once lowered
    combine: str = ""  # what a lookup makes of its rows
    collectives: tuple[Collective, ...] = ()  # its collective calls, in order, with those of the backward last
    passes: tuple[str, ...] = ()  # the passes that made or changed it or a node that it replaces, in order
    made_by: str = ""  # the pass that made it
    on_host: bool = False  # whether the node runs on the host of the device that has the tables


def annotate(node: fx.Node, meta: NodeMeta) -> fx.Node:
    """Attach ``meta`` to ``node`` and return the node."""
    node.meta[META_KEY] = meta
    return node


def node_meta(node: fx.Node) -> NodeMeta | None:
    """The metadata of ``node``; None for a node that recfx did not make."""
    meta = node.meta.get(META_KEY)
    return meta if isinstance(meta, NodeMeta) else None


def find_module(graph_module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that ``node`` calls, of any class; None if it does not call one."""
    if node.op != "call_module":
        return None
    try:
        return graph_module.get_submodule(str(node.target))
    except AttributeError:
        return None
