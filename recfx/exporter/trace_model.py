"""The traced model around exported graphs of its collections.

A trace takes the model's own Python away as far as it reaches: dataclasses, dictionaries and other arguments that
TorchScript does not know are gone then. A module that cannot be traced stays one call, which TorchScript may compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.conversion.whole_graph import inline_graph
from recfx.discovery.proxies import Assigned
from recfx.discovery.sample import Sample
from recfx.discovery.shallow_tracer import ShallowTracer, rollback_of, trace_graph, with_forward
from recfx.errors import Diagnostic, ExportError
from recfx.exporter.batch_proxies import BatchProxy, check_dtypes, check_read_features, has_known_features
from recfx.exporter.compare_outputs import run_model
from recfx.exporter.model_call import ModelCall
from recfx.exporter.model_copies import fresh_copy, restore_buffers
from recfx.exporter.patterns import identifier
from recfx.exporter.returns import is_typed, take_apart
from recfx.runtime.base import has_forward_hooks

_TYPES = {"tensor": torch.Tensor, "kjt": KeyedJaggedTensor}


def warmed(call: ModelCall) -> ModelCall:
    """The call of a copy of the model that has run once, because some modules prepare themselves then."""
    warm, copies = fresh_copy(call.model)
    run_model(warm, call.sample)
    restore_buffers(warm, call.model)
    return replace(call, model=warm, served={id(copies[key]): module for key, module in call.served.items()})


class WayFailed(Exception):
    """A way does not lead to a program. If that is because of one module, the diagnostic has its path."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(str(diagnostic))
        self.diagnostic = diagnostic


class TracedModel(NamedTuple):
    """A model as a graph around exported graphs of its collections.

    Args:
        graph_module: the graph.
        paths: the path in the model of each module of the graph, by its name there.
        rollbacks: why modules could not be traced, by path.
    """

    graph_module: fx.GraphModule
    paths: dict[str, str]
    rollbacks: dict[str, str]


class _Tracer(ShallowTracer):
    """A tracer that enters all modules but collections and torch's own, and records forward hooks."""

    def __init__(self, collections: set[int]) -> None:
        super().__init__(collections)
        self.reads: set[fx.Node] = set()
        self.described: dict[fx.Node, Any] = {}
        """The arguments, as the sample has them, on whose dtypes or ranks constants of the graph depend."""

    def call_module(self, m: nn.Module, *call: Any) -> Any:
        """Nobody may read what a module that stays a call has assigned: it would be that of the sample."""
        output = super().call_module(m, *call)
        for module, name in self.observed.assigned:
            module.__dict__[name] = Assigned(name)
        self.observed.assigned.clear()
        return output

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A proxy that knows its features, if it is a batch and they are known."""
        proxy = super().proxy(node)
        is_batch = isinstance(proxy.value, KeyedJaggedTensor) and has_known_features(node)
        return BatchProxy(node, self, self.reads) if is_batch else proxy

    def is_constant(self, node: fx.Node, attribute: str) -> bool:
        """True: the graph checks the dtypes and ranks of the arguments that it depends on."""
        waiting, reached = [node], set[fx.Node]()
        while waiting:
            node = waiting.pop()
            is_collection = node.op == "call_module" and id(self.root.get_submodule(str(node.target))) in self.leaves
            if node not in reached and not is_collection:
                reached.add(node)
                waiting += node.all_input_nodes
        for node in reached:
            if node.op == "placeholder" and (
                attribute not in ("dim", "ndim") or isinstance(self.observed[node], torch.Tensor)
            ):
                self.described[node] = self.observed[node]
        return True

    def fixed(self, proxy: fx.Proxy, *, number: bool = False) -> Any:
        """Refuse to make a constant, which a file would not check."""
        raise TraceError(f"Python needs the value of {proxy.node.name} while it is traced")

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """True for collections, and for torch's own modules; but hooks are part of the graph, and TorchScript would
        take what is passed to ``nn.Identity`` for a tensor.
        """
        if has_forward_hooks(m) or type(m) is nn.Identity:
            return False
        return isinstance(m, ConvertedCollection) or super(ShallowTracer, self).is_leaf_module(m, module_qualified_name)


def trace_model(call: ModelCall) -> TracedModel:
    """The trace of a warmed model around exported graphs.

    If ``is_typed`` is False for what the model returns, the graph returns tensors by name.

    Raises:
        WayFailed: it cannot be traced.
    """
    live, copies = fresh_copy(call.model)
    tracer = _Tracer({id(copies[collection]) for collection in call.served})
    entry = _with_leaves(live, call)
    try:
        sample = Sample(*call.leaves(call.sample))
        graph = trace_graph(entry, sample, tracer, inference=True, observe=[sample])
        graph._tracer_cls = None
        check_read_features(graph, {node: tracer.observed[node] for node in tracer.reads})
        check_dtypes(graph, tracer.described)
        paths = {identifier(str(node.target), ()): str(node.target) for node in graph.find_nodes(op="call_module")}
        graph_module = _around_served(call, entry, graph)
    except ExportError:
        raise
    except Exception as error:  # user code on proxies can raise anything; the reason is part of the error
        raise WayFailed(rollback_of("", error)) from error
    rollbacks = {rollback.path: rollback.message for rollback in tracer.rollbacks}
    return TracedModel(graph_module, paths, rollbacks)


def _around_served(call: ModelCall, entry: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """The traced graph with exported graphs in the place of the collections."""
    root, _ = fresh_copy(call.model, call.graphs)
    _keep_constants(root, entry, graph)
    for node, leaf in zip(graph.find_nodes(op="placeholder"), call.signature.leaves(), strict=True):
        node.type = _TYPES[leaf.kind]
    graph_module = flat_graph_module(root, graph)
    _inline(graph_module, call.graphs)
    return flat_graph_module(graph_module, graph_module.graph)


def _keep_constants(root: nn.Module, entry: nn.Module, graph: fx.Graph) -> None:
    """Attributes that the graph reads but ``root`` does not have: constants of the trace, weights of tables."""
    for node in graph.find_nodes(op="get_attr"):
        value = attrgetter(str(node.target))(entry)
        if isinstance(value, torch.Tensor) and not _has(root, str(node.target)):
            name = str(node.target).replace(".", "_")
            root.register_buffer(name, value.detach())
            node.target = name


def _has(root: nn.Module, path: str) -> bool:
    try:
        return attrgetter(path)(root) is not None
    except AttributeError:
        return False


def _inline(graph_module: fx.GraphModule, served: Mapping[int, nn.Module]) -> None:
    """Replace calls of exported collections with their nodes; those inside opaque modules stay calls."""
    exported = {id(module) for module in served.values()}
    inlined: dict[str, nn.Module] = {}
    for node in list(graph_module.graph.nodes):
        path = _called(node)
        if path is None:
            continue
        collection = inlined.get(path) or graph_module.get_submodule(path)
        if id(collection) in exported:
            assert isinstance(collection, fx.GraphModule)
            inline_graph(node, collection.graph, path)
            inlined[path] = collection
    for path, collection in inlined.items():
        holder = nn.Module()
        holder._modules.update(collection._modules)
        graph_module.add_submodule(path, holder)
    graph_module.recompile()


def _called(node: fx.Node) -> str | None:
    """The path of the module that a node calls; a collection that has hooks is called by its ``forward``."""
    if node.op == "call_method" and node.target == "forward":
        module, *args = node.args
        assert isinstance(module, fx.Node)
        node.args = tuple(args)
        return str(module.target)
    return str(node.target) if node.op == "call_module" else None


def _with_leaves(root: nn.Module, of: ModelCall) -> nn.Module:
    """``root`` with a ``forward`` that takes the tensors and KJTs of its arguments, one after the other.

    If TorchScript has no type for what it returns, it returns the tensors in it by name.
    """
    forward = root.__dict__.get("forward") or type(root).forward.__get__(root)
    original = root._call_impl if has_forward_hooks(root) else forward

    def call(*leaves: Any) -> Any:
        made = of.signature.call_of(leaves)
        returned = original(*made.args, **made.kwargs)
        tensors = take_apart(of.returns, returned)
        return returned if is_typed(of.returns) else tensors

    return with_forward(root, [leaf.name for leaf in of.signature.leaves()], call)


def flat_graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module that has what the graph uses, under its full path with underscores, and nothing else."""
    used: dict[str, Any] = {}
    names: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            path = str(node.target)
            if path not in names:
                names[path] = identifier(path, used)
                used[names[path]] = attrgetter(path)(root)
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
