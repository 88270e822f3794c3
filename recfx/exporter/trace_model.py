"""The traced model around exported graphs of its collections.

A trace takes the model's own Python away as far as it reaches: dataclasses, dictionaries and other arguments that
TorchScript does not know are gone then. A module that cannot be traced stays one call, which TorchScript may compile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.conversion.whole_graph import inline_graph
from recfx.errors import Diagnostic, ExportError
from recfx.exporter.compare_outputs import ModelCall, run_model
from recfx.exporter.model_copies import fresh_copy, own_buffers
from recfx.exporter.patterns import identifier, is_typed, take_apart
from recfx.exporter.serving.named_inputs import check_plain
from recfx.models.proxies import Assigned, InPlaceProxy
from recfx.models.sample import Sample
from recfx.models.shallow_tracer import ShallowTracer, rollback_of
from recfx.models.trace_graph import trace_graph, with_forward
from recfx.runtime.base import has_forward_hooks


class _BatchType(type):
    """What ``type(features)`` is while tracing: models also call it, and its static methods, to make a batch."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], fx.Node):
            return super().__call__(*args, **kwargs)
        return KeyedJaggedTensor(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(KeyedJaggedTensor, name)


class BatchProxy(InPlaceProxy, metaclass=_BatchType):
    """A proxy of a KJT that has the features of its value; ``reads`` collects the nodes whose features are read."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, reads: set[fx.Node]) -> None:
        super().__init__(node, tracer)
        self._reads = reads

    def keys(self) -> list[str]:  # type: ignore[override]  # a proxy's would be a proxy
        """The names themselves: what is made of them is part of the graph."""
        return list(self._read().keys())

    def weights_or_none(self) -> fx.Proxy | None:
        """The weights; None, as code asks for it, where the batch has none."""
        if self._read().weights_or_none() is None:
            return None
        weights: fx.Proxy = self.weights()
        return weights

    def variable_stride_per_key(self) -> bool:
        """False: features of different batch sizes are not served."""
        self._read()
        return False

    def _read(self) -> KeyedJaggedTensor:
        self._reads.add(self.node)
        features: KeyedJaggedTensor = self.value
        return features


def as_traced(features: KeyedJaggedTensor, argument: str, names: list[str], is_weighted: bool) -> KeyedJaggedTensor:
    """The batch, if its features are those that the traced code has read in the sample."""
    check_plain(argument, features)
    if (features.weights_or_none() is not None) != is_weighted:
        expected = "with" if is_weighted else "without"
        raise RuntimeError(f"{argument}: the model was exported for a batch {expected} weights [bad_weights]")
    if features.keys() != names:
        raise RuntimeError(
            f"{argument}: the model was exported for the features {names}, in this order [other_features]"
        )
    return features


def as_in_sample(tensor: torch.Tensor, argument: str, dtype: torch.dtype, dimensions: int) -> torch.Tensor:
    """The tensor, if it has the dtype and the rank that the traced code has read in the sample."""
    if tensor.dtype != dtype:
        raise RuntimeError(f"input {argument} has not the dtype of the sample, which the model reads [wrong_dtype]")
    if tensor.dim() != dimensions:
        raise RuntimeError(f"input {argument} must have {dimensions} dimensions [wrong_rank]")
    return tensor


def _check(graph: fx.Graph, node: fx.Node, function: Callable[..., Any], *expected: Any) -> None:
    argument = node if node.op == "placeholder" else node.all_input_nodes[0]
    with graph.inserting_after(node):
        checked = graph.call_function(function, (node, str(argument.target), *expected))
    node.replace_all_uses_with(checked, lambda user: user is not checked)


_TYPES = {"tensor": torch.Tensor, "kjt": KeyedJaggedTensor}


def warmed(call: ModelCall) -> ModelCall:
    """The call of a copy of the model that has run once, because some modules prepare themselves then."""
    warm, copies = fresh_copy(call.model)
    run_model(warm, call.sample)
    before = dict(call.model.named_buffers())
    for name, buffer in own_buffers(warm).items():
        if name in before and buffer.shape == before[name].shape:
            buffer.copy_(before[name])
    return replace(call, model=warm, served={id(copies[key]): module for key, module in call.served.items()})


class WayFailed(Exception):
    """A way does not lead to a program. If that is because of one module, the diagnostic has its path."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(str(diagnostic))
        self.diagnostic = diagnostic


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
        if type(m) is not KTRegroupAsDict or has_forward_hooks(m) or not issubclass(type(output), fx.Proxy):
            return output
        regroup: Any = m
        items = {key: operator.getitem(output, key) for key in regroup._keys}  # code may iterate over them
        self._items += [item.node for item in items.values()]
        return items

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A proxy that knows its features, if it is a batch whose features are constants."""
        proxy = super().proxy(node)
        keys: Any = node.args[0] if node.args else node.kwargs.get("keys")
        is_made = node.target is KeyedJaggedTensor and isinstance(keys, (list, tuple))
        is_known = node.op == "placeholder" or (is_made and all(isinstance(key, str) for key in keys))
        return BatchProxy(node, self, self.reads) if is_known and isinstance(proxy.value, KeyedJaggedTensor) else proxy

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


class _Around(nn.Module):
    """Calls a model that is a collection itself, which no tracer enters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def trace_model(call: ModelCall) -> tuple[fx.GraphModule, dict[str, str], dict[str, str]]:
    """The trace of a warmed model around exported graphs; the path in the model of each module of the graph, by its
    name there; and why modules could not be traced, by path. ``WayFailed`` if the model itself cannot be.
    """
    live, copies = fresh_copy(call.model)
    live = _Around(live) if id(call.model) in call.served else live
    tracer = _Tracer({id(copies[collection]) for collection in call.served})
    entry = _with_leaves(live, call)
    try:
        sample = Sample(*call.leaves(call.sample))
        graph = trace_graph(entry, sample, tracer, inference=True, observe=[sample])
        graph._tracer_cls = None
        for node in tracer.reads:
            if node.op == "placeholder":
                batch = tracer.observed[node]
                _check(graph, node, as_traced, batch.keys(), batch.weights_or_none() is not None)
        for node, value in tracer.described.items():
            is_batch = isinstance(value, KeyedJaggedTensor)
            for part in ("values", "lengths", "weights_or_none") if is_batch else ("",):
                tensor = getattr(value, part)() if part else value
                if tensor is not None:
                    with graph.inserting_after(node):
                        read = graph.call_method(part.removesuffix("_or_none"), (node,)) if part else node
                    _check(graph, read, as_in_sample, tensor.dtype, tensor.dim())
        graph_module, paths = _around_served(call, entry, graph)
    except ExportError:
        raise
    except Exception as error:  # user code on proxies can raise anything; the reason is part of the error
        raise WayFailed(rollback_of("", error)) from error
    rollbacks = {rollback.path: rollback.message for rollback in tracer.rollbacks}
    return graph_module, paths, rollbacks


def _around_served(call: ModelCall, entry: nn.Module, graph: fx.Graph) -> tuple[fx.GraphModule, dict[str, str]]:
    """The traced graph with exported graphs in the place of the collections; those inside opaque modules stay calls.
    And the path in the model of each module and tensor of the graph, by its name there.
    """
    root, _ = fresh_copy(call.model, call.graphs)
    root = _Around(root) if id(call.model) in call.served else root
    renamed = _keep_constants(root, entry, graph)
    for node, leaf in zip(graph.find_nodes(op="placeholder"), call.signature.leaves(), strict=True):
        node.type = _TYPES[leaf.kind]
    exported = {id(module) for module in call.graphs.values()}
    for node in list(graph.nodes):
        path = _called(node)
        if path is not None and id(collection := root.get_submodule(path)) in exported:
            assert isinstance(collection, fx.GraphModule)
            inline_graph(node, collection.graph, path)
    graph_module, names = _flat_graph_module(root, graph)
    return graph_module, {name: renamed.get(path, path) for path, name in names.items()}


def _keep_constants(root: nn.Module, entry: nn.Module, graph: fx.Graph) -> dict[str, str]:
    """Attributes that the graph reads but ``root`` does not have: constants of the trace, weights of tables. Returns
    their paths by the names that they have now.
    """
    renamed: dict[str, str] = {}
    tensors = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
    present = {name for name, _ in tensors}
    for node in graph.find_nodes(op="get_attr"):
        value = attrgetter(str(node.target))(entry)
        if isinstance(value, torch.Tensor) and str(node.target) not in present:
            name = str(node.target).replace(".", "_")
            while name != node.target and hasattr(root, name):
                name += "_"
            root.__dict__.pop(name, None)  # a plain attribute, which becomes a buffer
            root._buffers[name] = value.detach()
            renamed[name] = str(node.target)
            node.target = name
    return renamed


def _called(node: fx.Node) -> str | None:
    """The path of the module that a node calls; a collection that has hooks is called by its ``forward``."""
    if node.op == "call_method" and node.target == "forward":
        module, *args = node.args
        assert isinstance(module, fx.Node)
        node.args = tuple(args)
        if not module.users:
            node.graph.erase_node(module)
        return str(module.target)
    return str(node.target) if node.op == "call_module" else None


def _with_leaves(root: nn.Module, of: ModelCall) -> nn.Module:
    """``root`` with a ``forward`` that takes the tensors and KJTs of its arguments, one after the other; if TorchScript
    has no type for what it returns, it returns the tensors in it by name.
    """
    forward = root.__dict__.get("forward") or type(root).forward.__get__(root)
    original = root._call_impl if has_forward_hooks(root) else forward

    def call(*leaves: Any) -> Any:
        made = of.signature.call_of(leaves)
        returned = original(*made.args, **made.kwargs)
        tensors = take_apart(of.returns, returned)
        return returned if is_typed(of.returns) else tensors

    return with_forward(root, [leaf.name for leaf in of.signature.leaves()], call)


def _flat_graph_module(root: nn.Module, graph: fx.Graph) -> tuple[fx.GraphModule, dict[str, str]]:
    """A graph module that has what the graph uses, under its full path with underscores, and nothing else; and these
    names by path.
    """
    used: dict[str, Any] = {}
    names: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            path = str(node.target)
            if path not in names:
                names[path] = identifier(path, used)
                used[names[path]] = attrgetter(path)(root)
            node.target = names[path]
    return fx.GraphModule(used, graph), names
