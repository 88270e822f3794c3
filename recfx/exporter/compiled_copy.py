"""What torch compiles in the place of a converted model: a copy around exported graphs.

The kernels of a converted collection are chosen in Python, so neither TorchScript nor ``torch.export`` can compile
them. The copy has the exported graph of each collection instead, which ``recfx.export`` would write, and otherwise the
model's own modules and tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter, getitem

import torch
from torch import fx, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.converted_collection import ConvertedCollection, converted_collections
from recfx.collections.copy_modules import carry_over, copy_modules
from recfx.collections.kinds import kind_of
from recfx.collections.whole_graph import WholeGraph
from recfx.errors import Diagnostic, ExportError, Severity
from recfx.exporter.served_collection import serve_collection, stored_dtypes
from recfx.exporter.serving.targets import SCRIPT, TRACED, ServingTarget
from recfx.exporter.table_sources import local_tables
from recfx.runtime.base import FxLeaf
from recfx.runtime.hooks import FORWARD_HOOKS

_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (torch.Tensor, KeyedJaggedTensor, JaggedTensor, KeyedTensor, int, float, bool, str)
}

_METHODS = (types.FunctionType, property, staticmethod, classmethod)


@dataclass(frozen=True)
class Compiler:
    """One of torch's compilers.

    Args:
        name: the function that users call.
        target: the modules that it can compile.
        reason: the reason code of what it cannot compile.
        instead: what to call instead.
    """

    name: str
    target: ServingTarget
    reason: str
    instead: str


TORCHSCRIPT = Compiler("torch.jit.script", SCRIPT, "not_scriptable", "recfx.export(model, path, sample)")
TORCH_EXPORT = Compiler(
    "torch.export.export", TRACED, "not_exportable", 'recfx.export(model, path, sample, format="pt2")'
)


def holds_converted(module: nn.Module) -> bool:
    """Whether anything below ``module`` is a converted collection, or a node of its graph."""
    return any(isinstance(submodule, FxLeaf) for submodule in module.modules())


def compiled_copy(model: nn.Module, compiler: Compiler) -> nn.Module:
    """The copy of a model that torch compiles. Its rows and slots are copies, all other tensors the model's own.

    Args:
        model: a converted model, or the graph of one, whichever torch.fx tracer made it. Its collections answer as in
            eval mode; everything else is in the mode that it is in.
        compiler: what compiles it.

    Raises:
        ExportError: ``not_scriptable`` or ``not_exportable``: a collection is sharded or not on the CPU, or the nodes
            of a collection were changed; TorchScript also refuses graphs that take a dataclass.
    """
    _check(model, compiler)
    collections = unsharded_collections(model)
    dtypes = stored_dtypes({path: collection.tables for path, collection in collections.items()}, None)
    replacements: dict[int, nn.Module] = {}
    for path, collection in collections.items():
        served = serve_collection(path, collection, local_tables(collection), dtypes[path], compiler.target)
        for filling in served.fillings:
            filling.fill()
        for name in FORWARD_HOOKS:  # TorchScript compiles them too
            served.graph_module.__dict__[name] = collection.__dict__[name].copy()
        _answer_as(collection, served.graph_module)
        replacements[id(collection)] = served.graph_module.eval()
    return _Lowering(replacements, compiler).lowered(model)


def _answer_as(collection: UnshardedCollection, graph_module: fx.GraphModule) -> None:
    """Give the exported graph what a model may ask its collection for, besides ``forward``; but it has no tables."""
    carry_over(collection, graph_module, skip=collection.own_names())
    kind = kind_of(collection)
    of_standard = vars(kind.empty_like(collection))
    graph_module.__dict__ |= {name: of_standard[name] for name in of_standard.keys() - vars(nn.Module()).keys()}
    graph_module.__dict__["_device"] = torch.device(collection.device)
    standard: type[nn.Module] = getattr(type(collection), "_standard", kind.standard)
    for base in reversed(standard.__mro__[: standard.__mro__.index(nn.Module)]):
        for name, value in vars(base).items():
            if isinstance(value, _METHODS) and not hasattr(fx.GraphModule, name):
                setattr(type(graph_module), name, value)  # each GraphModule has a class of its own


def _check(model: nn.Module, compiler: Compiler) -> None:
    collections = converted_collections(model)
    for path, collection in collections.items():
        if collection.is_sharded:
            raise ExportError(
                f"{compiler.name} cannot compile a sharded collection.",
                reason=compiler.reason,
                module_path=path,
                what_to_do=f"call {compiler.instead} on every rank.",
            )
        device = collection.store.device
        if device.type != "cpu":
            raise ExportError(
                f"{compiler.name} compiles exported graphs, whose tables are on the CPU, but these are on {device}.",
                reason=compiler.reason,
                module_path=path,
                what_to_do="load the weights, or move the model with model.to('cpu').",
            )


def trained_paths(model: nn.Module) -> list[str]:
    """The collections that are in training mode, and then the graphs that were traced in it."""
    graphs = {path: module for path, module in model.named_modules() if isinstance(module, fx.GraphModule)}
    return [
        *(path for path, collection in converted_collections(model).items() if collection.training),
        *(path for path, graph in graphs.items() if graph.meta.get("recfx_training", False)),
    ]


def compiled_for_eval(model: nn.Module) -> Diagnostic | None:
    """What users are told if they script a model that trains; None for a model in eval mode.

    TorchScript compiles a standard collection in training mode, too, and its script trains the tables of the model.
    """
    path = next(iter(trained_paths(model)), None)
    if path is None:
        return None
    return Diagnostic(
        "scripted_for_eval",
        path,
        "it is (or was traced) in training mode, but torch.jit.script compiles converted collections as they answer in "
        "eval mode: the script has copies of their rows, which get no gradients, and gives no row to a new id. What is "
        "around them is compiled in the mode that it is in.",
        "nothing for a test; for serving, call model.eval() first, and trace it after that; for training, use the "
        "model itself.",
        Severity.WARNING,
    )


@dataclass(frozen=True)
class _Lowering:
    """How a model becomes one that a compiler can take; ``replacements`` take the place of collections, by ``id``."""

    replacements: Mapping[int, nn.Module]
    compiler: Compiler

    def lowered(self, module: nn.Module) -> nn.Module:
        """``module`` with its collections replaced; itself if it holds none."""
        if id(module) in self.replacements:
            return self.replacements[id(module)]
        if not holds_converted(module):
            return module
        if isinstance(module, WholeGraph):
            return self.lowered(module.graph_module)
        if isinstance(module, fx.GraphModule):
            return self._lowered_graph(module)
        graphs = {
            id(submodule): self.lowered(submodule)
            for submodule in _topmost(module, self.replacements)
            if isinstance(submodule, fx.GraphModule | WholeGraph)
        }
        return copy_modules(module, {**self.replacements, **graphs})[0]

    def _lowered_graph(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = copy.deepcopy(graph_module.graph)
        _outline_collections(graph_module, graph, self.compiler)
        if self.compiler is TORCHSCRIPT:
            collections = {path for path, module in graph_module.named_modules() if id(module) in self.replacements}
            _type_inputs(graph, collections)
        used = dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr"))
        parts: dict[str, object] = {path: attrgetter(path)(graph_module) for path in used}
        lowered = {path: self.lowered(part) if isinstance(part, nn.Module) else part for path, part in parts.items()}
        copied = fx.GraphModule(lowered, graph, type(graph_module).__name__)
        copied.training = graph_module.training
        return copied


def _topmost(module: nn.Module, replacements: Mapping[int, nn.Module]) -> list[nn.Module]:
    """The modules below ``module`` that are not inside a collection or a graph."""
    topmost, waiting = [], list(module.children())
    while waiting:
        submodule = waiting.pop()
        topmost.append(submodule)
        if id(submodule) not in replacements and not isinstance(submodule, fx.GraphModule | WholeGraph):
            waiting += submodule.children()
    return topmost


def _outline_collections(graph_module: fx.GraphModule, graph: fx.Graph, compiler: Compiler) -> None:
    """Turn the inlined nodes of each collection's graph into one call of the collection again."""
    for node in list(graph.nodes):
        path = _collection_of(graph_module, node)
        if path is None or any(_collection_of(graph_module, user) == path for user in node.users):
            continue
        features = _input_of(graph_module, node, path, compiler)
        with graph.inserting_before(node):
            call = graph.call_module(path, (features,))
        node.replace_all_uses_with(call)
    for node in reversed(list(graph.nodes)):
        if _collection_of(graph_module, node) is not None and not node.users:
            graph.erase_node(node)


def _type_inputs(graph: fx.Graph, collections: set[str]) -> None:
    """Types that TorchScript finds: postponed annotations are strings, and without one it takes a KJT for a tensor."""
    for node in graph.nodes:
        if isinstance(node.type, str):
            node.type = _TYPES.get(node.type.rpartition(".")[2])
        if node.op == "placeholder" and isinstance(node.type, type) and dataclasses.is_dataclass(node.type):
            raise ExportError(
                f"TorchScript has no type for the argument {node.target}, which is a {node.type.__name__}.",
                reason="not_scriptable",
                what_to_do="call recfx.export(model, path, sample): its file takes the tensors in that argument.",
            )
        if node.op == "call_module" and node.target in collections:
            for features in node.all_input_nodes:
                if features.op == "placeholder" and features.type is None:
                    features.type = KeyedJaggedTensor


def _collection_of(graph_module: fx.GraphModule, node: fx.Node) -> str | None:
    """The path of the collection in whose graph this node is; None if it is in none."""
    if node.target is getitem and isinstance(node.args[1], int) and isinstance(node.args[0], fx.Node):
        return _owner(graph_module, node.args[0])  # an item of a node's value; the collection itself returns no tuple
    return _owner(graph_module, node)


def _owner(graph_module: fx.GraphModule, node: fx.Node) -> str | None:
    owner, inside, _ = str(node.target).rpartition(".graph_module.")
    if node.op != "call_module" or not inside:
        return None
    return owner if isinstance(graph_module.get_submodule(owner), ConvertedCollection) else None


def _input_of(graph_module: fx.GraphModule, output: fx.Node, path: str, compiler: Compiler) -> fx.Node:
    """The batch from which the nodes of a collection's graph make ``output``."""
    inputs: dict[fx.Node, None] = {}
    waiting, seen = [output], {output}
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if _collection_of(graph_module, node) != path:
                inputs[node] = None
            elif node not in seen:
                seen.add(node)
                waiting.append(node)
    if len(inputs) != 1:
        raise ExportError(
            f"the graph was changed: the nodes of the collection take {len(inputs)} inputs instead of one.",
            reason=compiler.reason,
            module_path=path,
            what_to_do=f"call {compiler.instead}, or compile the graph as recfx.trace returned it.",
        )
    return next(iter(inputs))
