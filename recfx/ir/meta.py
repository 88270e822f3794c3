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
    """A line of the user's code.

    Args:
        file: its file.
        line: its number.
        called_from: if it is in an installed package, the line outside of such packages that led to it.
    """

    file: str
    line: int
    called_from: SourceLocation | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Collective:
    """One collective call of a node.

    Args:
        operation: ``"all_to_all"``, ``"reduce_scatter"``, ``"all_gather"`` or ``"all_reduce"``.
        bytes: symbolic size of what this rank passes to the call, including its own part.
        backward: whether the call runs in the backward.
        ranks: how many ranks take part; 0 if all do.
        across_hosts: whether each of these ranks is on a host of its own.
    """

    operation: str
    bytes: sympy.Expr
    backward: bool = False
    ranks: int = 0
    across_hosts: bool = False


@dataclass(frozen=True)
class NodeMeta(Frozen):
    """Facts about one node.

    Args:
        kind: name of a declared node kind.
        collection: fully qualified name of the collection that it belongs to; ``""`` for a root.
        shape: symbolic shape in ``B``, ``W`` and ``L_<feature>``; for a KJT, the number of ids.
        dtype: element type, if the value is a single tensor.
        bytes: symbolic size of the value.
        device: device type of the value, ``""`` if not known yet.
        source: where the user's code creates the collection, if known.
        tables: names of the tables that the node works on.
        kernel: the backend that serves a lookup, once lowered.
        combine: what a lookup makes of its rows.
        collectives: the collective calls of the node, in order, with those of the backward last.
        passes: the passes that made or changed it or a node that it replaces, in order.
        made_by: the pass that made it.
        on_host: whether the node runs on the host of the device that has the tables.
    """

    kind: str
    collection: str
    shape: tuple[sympy.Expr, ...] = ()
    dtype: torch.dtype | None = None
    bytes: sympy.Expr = sympy.Integer(0)
    device: str = ""
    source: SourceLocation | None = None
    tables: tuple[str, ...] = ()
    kernel: str = ""
    combine: str = ""
    collectives: tuple[Collective, ...] = ()
    passes: tuple[str, ...] = ()
    made_by: str = ""
    on_host: bool = False


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
