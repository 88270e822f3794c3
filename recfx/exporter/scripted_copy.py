"""What ``torch.jit.script`` compiles in the place of a converted model: a copy around exported graphs.

The kernels of a converted collection are chosen in Python, so TorchScript cannot compile them. The copy has the
exported graph of each collection instead, which ``recfx.export`` would write, and otherwise the model's own modules and
tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from operator import getitem

import torch
from torch import fx, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.errors import ExportError
from recfx.exporter.quantization import stored_dtypes
from recfx.exporter.served_collection import serve_collection
from recfx.hooks import FORWARD_HOOKS
from recfx.modules.collection import unsharded_collections
from recfx.modules.converted_collection import ConvertedCollection, converted_collections
from recfx.modules.copy_modules import copy_modules
from recfx.modules.whole_graph import WholeGraph
from recfx.nodes.fx_leaf import FxLeaf

_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (torch.Tensor, KeyedJaggedTensor, JaggedTensor, KeyedTensor, int, float, bool, str)
}


def holds_converted(module: nn.Module) -> bool:
    """Whether anything below ``module`` is a converted collection, or a node of its graph."""
    return any(isinstance(each, FxLeaf) for each in module.modules())


def scripted_copy(model: nn.Module) -> nn.Module:
    """The copy of a model that TorchScript compiles. Its rows and slots are copies, all other tensors the model's own.

    Args:
        model: a converted model in eval mode, or the graph of one, whichever torch.fx tracer made it.

    Raises:
        ExportError: ``training_mode``; ``not_scriptable``: a collection is sharded or not on the CPU, a graph takes a
            dataclass, or the nodes of a collection were changed.
    """
    _check(model)
    collections = unsharded_collections(model)
    dtypes = stored_dtypes({path: each.tables for path, each in collections.items()}, None)
    replacements: dict[int, nn.Module] = {}
    for path, collection in collections.items():
        served = serve_collection(path, collection, dtypes[path])
        for filling in served.fillings:
            filling.fill()
        for name in FORWARD_HOOKS:  # TorchScript compiles them too
            served.graph_module.__dict__[name] = collection.__dict__[name].copy()
        replacements[id(collection)] = served.graph_module.eval()
    return _lowered(model, replacements)


def _check(model: nn.Module) -> None:
    collections = converted_collections(model)
    for path, collection in collections.items():
        if collection.is_sharded:
            raise ExportError(
                "torch.jit.script cannot compile a sharded collection.",
                reason="not_scriptable",
                module_path=path,
                what_to_do="call recfx.export(model, path, sample) on every rank.",
            )
        device = collection.store.device
        if device.type != "cpu":
            raise ExportError(
                f"torch.jit.script compiles exported graphs, whose tables are on the CPU, but these are on {device}.",
                reason="not_scriptable",
                module_path=path,
                what_to_do="load the weights, or move the model with model.to('cpu').",
            )
    for path, module in [("", model), *collections.items()]:
        if module.training:
            raise _in_training_mode(path, "call model.eval() before torch.jit.script.")
    for path, module in model.named_modules():
        if isinstance(module, fx.GraphModule) and module.meta.get("recfx_training", False):
            raise _in_training_mode(path, "call recfx.trace(model.eval(), sample), and script that graph.")


def _in_training_mode(path: str, what_to_do: str) -> ExportError:
    return ExportError(
        "torch.jit.script compiles a converted model as it answers in eval mode, but this is in training mode.",
        reason="training_mode",
        module_path=path,
        what_to_do=what_to_do,
    )


def _lowered(module: nn.Module, replacements: Mapping[int, nn.Module]) -> nn.Module:
    """``module`` with its collections replaced; itself if it holds none."""
    if id(module) in replacements:
        return replacements[id(module)]
    if not holds_converted(module):
        return module
    if isinstance(module, WholeGraph):
        return _lowered(module.eval_graph, replacements)
    if isinstance(module, fx.GraphModule):
        return _lowered_graph(module, replacements)
    graphs = {
        id(each): _lowered(each, replacements)
        for each in _topmost(module, replacements)
        if isinstance(each, fx.GraphModule | WholeGraph)
    }
    return copy_modules(module, {**replacements, **graphs})[0]


def _topmost(module: nn.Module, replacements: Mapping[int, nn.Module]) -> list[nn.Module]:
    """The modules below ``module`` that are not inside a collection or a graph."""
    found, waiting = [], list(module.children())
    while waiting:
        each = waiting.pop()
        found.append(each)
        if id(each) not in replacements and not isinstance(each, fx.GraphModule | WholeGraph):
            waiting += each.children()
    return found


def _lowered_graph(graph_module: fx.GraphModule, replacements: Mapping[int, nn.Module]) -> fx.GraphModule:
    graph = copy.deepcopy(graph_module.graph)
    _outline_collections(graph_module, graph)
    _type_inputs(graph, {path for path, each in graph_module.named_modules() if id(each) in replacements})
    used = dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr"))
    parts: dict[str, object] = {path: _attribute(graph_module, path) for path in used}
    lowered = {
        path: _lowered(part, replacements) if isinstance(part, nn.Module) else part for path, part in parts.items()
    }
    copied = fx.GraphModule(lowered, graph, type(graph_module).__name__)
    copied.training = False
    return copied


def _attribute(module: nn.Module, path: str) -> object:
    found: object = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _outline_collections(graph_module: fx.GraphModule, graph: fx.Graph) -> None:
    """Turn the inlined nodes of each collection's graph into one call of the collection again."""
    for node in list(graph.nodes):
        path = _collection_of(graph_module, node)
        if path is None or any(_collection_of(graph_module, user) == path for user in node.users):
            continue
        features = _input_of(graph_module, node, path)
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
        return _owner(graph_module, node.args[0])  # of what a node returns; the collection itself returns no tuple
    return _owner(graph_module, node)


def _owner(graph_module: fx.GraphModule, node: fx.Node) -> str | None:
    owner, inside, _ = str(node.target).rpartition(".graph_module.")
    if node.op != "call_module" or not inside:
        return None
    return owner if isinstance(graph_module.get_submodule(owner), ConvertedCollection) else None


def _input_of(graph_module: fx.GraphModule, output: fx.Node, path: str) -> fx.Node:
    """The batch from which the nodes of a collection's graph make ``output``."""
    found: dict[fx.Node, None] = {}
    waiting, seen = [output], {output}
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if _collection_of(graph_module, each) != path:
                found[each] = None
            elif each not in seen:
                seen.add(each)
                waiting.append(each)
    if len(found) != 1:
        raise ExportError(
            f"the graph was changed: the nodes of the collection take {len(found)} inputs instead of one.",
            reason="not_scriptable",
            module_path=path,
            what_to_do="call recfx.export(model, path, sample), or script the graph as recfx.trace returned it.",
        )
    return next(iter(found))
