"""Value-range analysis: in which range the ids are that a traced model passes to a collection, and why.

Ids may be int32 unless the model makes them int64. What no rule is about has no known range, and neither have ids that
may be changed in place, nor the values of parameters and buffers that a ``state_dict`` may replace. The graph is one of
a sample; whoever relies on a range checks it in every batch.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.discovery.known_values import INT64, UNKNOWN, Features, Ids, attribute, of_attribute, of_input, within
from recfx.discovery.range_rules import FUNCTIONS, RULES, TAKES_TENSORS, VIEWS, Computed, name_of
from recfx.discovery.shallow_tracer import source_of
from recfx.ir.tables import IdRange


class IdRanges:
    """The ranges of one traced graph; ``inputs`` are the sample's values, by name of the placeholder."""

    def __init__(self, graph: fx.Graph, root: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.root, self._inputs = root, inputs
        self._known: dict[fx.Node, Any] = {}
        self._changed = [_ancestors(node) for node in graph.nodes if _is_in_place(node)]
        self._given_away: set[fx.Node] = set()
        for node in graph.nodes:
            if _may_change_its_arguments(node, root):
                self._given_away.update(*(_same_memory(given) for given in node.all_input_nodes))

    def of_call(self, call: fx.Node, features: Iterable[str]) -> dict[str, IdRange]:
        """The ranges of the features that a call of a collection reads; those that are not known are left out."""
        given = [*call.args, *call.kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], fx.Node):
            return {}
        before = _ancestors(given[0])
        if any(before & changed for changed in self._changed):
            return {}  # something that the ids are made of is changed in place
        if self._given_away & _same_memory(given[0]):
            return {}  # code that the trace does not see has the ids, and may change them in place
        batch = self.of(given[0])
        ranges = {}
        for feature in features if isinstance(batch, Features) else ():
            ids = batch.of(feature)
            if ids is not None and not within(INT64, ids.range):
                ranges[feature] = IdRange(int(ids.range.lower), int(ids.range.upper), ", then ".join(ids.why))
        return ranges

    def of(self, node: fx.Node) -> Any:
        """What is known of a node's value: ``Ids``, ``Features`` or an ``Object``, which may be ``UNKNOWN``."""
        pending = [node]
        while pending:  # not recursive, because graphs may be deep
            last = pending[-1]
            missing = [input for input in last.all_input_nodes if input not in self._known]
            if missing:
                pending += missing
            else:
                pending.pop()
                if last not in self._known:
                    known = self._evaluate(last)
                    self._known[last] = UNKNOWN if known is None else known
        return self._known[node]

    def _evaluate(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return of_input(self._inputs.get(str(node.target)))
        if node.op == "get_attr":
            return of_attribute(self.root, node)
        if node.op == "call_module":
            keeps_ids = type(self.root.get_submodule(str(node.target))) in (nn.Identity, nn.Flatten)
            return self.of(node.args[0]) if keeps_ids and node.args and isinstance(node.args[0], fx.Node) else None
        rule = RULES.get(name_of(node))
        if rule is None:
            return None
        known = partial(attribute, self.root) if rule in TAKES_TENSORS else self.of
        args, kwargs = fx.map_arg(node.args, known), fx.map_arg(node.kwargs, known)
        try:
            inspect.signature(rule).bind(*args, **kwargs)
        except TypeError:
            return None
        result = rule(*args, **kwargs)
        if not isinstance(result, Computed):
            return result
        site = source_of(node)
        step = f"{result.what} ({site})" if site else result.what
        return Ids(result.range, (*result.before.why, step), result.before.is_int64)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """The node, and everything that its value is made of."""
    nodes, pending = {node}, [node]
    while pending:
        new = set(pending.pop().all_input_nodes) - nodes
        nodes |= new
        pending += new
    return nodes


def _is_in_place(node: fx.Node) -> bool:
    """Whether it is a call that writes to one of its arguments."""
    if node.op not in ("call_method", "call_function"):
        return False
    schema = getattr(node.target, "_schema", None)  # operators such as torch.ops.aten.add_.Tensor have one
    if schema is not None:
        return bool(schema.is_mutable)
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    writes = name.endswith("_") and not name.endswith("__") and node.target not in (operator.and_, operator.or_)
    return (
        writes
        or name in fx.graph.inplace_methods
        or bool(node.kwargs.get("inplace"))
        or node.kwargs.get("out") is not None
    )


def _may_change_its_arguments(node: fx.Node, root: nn.Module) -> bool:
    """Whether it is code that the trace does not enter, a module or a function, and that nothing is known of."""
    if node.op == "call_module":
        return not all(_only_reads(inside) for inside in root.get_submodule(str(node.target)).modules())
    if node.op != "call_function" or node.target in FUNCTIONS:
        return False
    module = getattr(node.target, "__module__", None)  # functions that are written in C++ have none
    return module is not None and module.split(".")[0] not in _LIBRARIES


def _only_reads(module: nn.Module) -> bool:
    is_graph = isinstance(module, (fx.GraphModule, torch.jit.ScriptModule))
    inplace = getattr(module, "inplace", False)
    return type(module).__module__.split(".")[0] in _LIBRARIES and not is_graph and not inplace


_LIBRARIES = {"torch", "torchrec", "recfx", "_operator", "builtins", "math"}


def _same_memory(node: Any) -> set[fx.Node]:
    """The node, and the values in whose memory its ids may be."""
    values: set[fx.Node] = set()
    while isinstance(node, fx.Node) and node not in values:
        values.add(node)
        if node.target in _MAKERS:
            place = _MAKERS[node.target]
            node = node.args[place] if len(node.args) > place else node.kwargs.get("values")
        elif node.op == "call_module" or name_of(node) in VIEWS:
            node = node.args[0] if node.args else node.kwargs.get("input")
        else:
            break
    return values


_MAKERS: dict[Any, int] = {KeyedJaggedTensor: 1, JaggedTensor: 0}
"""The classes of batches of ids, and the place of the ids among the arguments."""
