"""What a traced graph may change in place, and which values share the memory of others."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.discovery.call_arguments import first_of
from recfx.discovery.operator_names import FUNCTIONS, name_of
from recfx.discovery.range_rules import VIEWS


def ancestors(node: fx.Node) -> set[fx.Node]:
    """The node, and everything that its value is made of."""
    found, pending = {node}, [node]
    while pending:
        for each in pending.pop().all_input_nodes:
            if each not in found:
                found.add(each)
                pending.append(each)
    return found


def is_in_place(node: fx.Node) -> bool:
    """Whether it is a call that writes to one of its arguments."""
    if node.op not in ("call_method", "call_function"):
        return False
    schema = getattr(node.target, "_schema", None)  # of an operator such as torch.ops.aten.add_.Tensor
    if schema is not None:
        return bool(schema.is_mutable)
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    writes = name.endswith("_") and not name.endswith("__") and node.target is not operator.and_
    return writes or name in _WRITING or bool(node.kwargs.get("inplace")) or node.kwargs.get("out") is not None


_WRITING = {
    "setitem",
    *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "mod", "floordiv", "and", "or", "xor", "pow", "lshift")),
    "irshift",
}


def may_change_its_arguments(node: fx.Node, root: nn.Module) -> bool:
    """Whether it is code that the trace does not enter, a module or a function, and that nothing is known of."""
    if node.op == "call_module":
        return not all(_only_reads(each) for each in root.get_submodule(str(node.target)).modules())
    if node.op != "call_function" or node.target in FUNCTIONS:
        return False
    module = getattr(node.target, "__module__", None)  # functions that are written in C++ have none
    return module is not None and module.split(".")[0] not in _LIBRARIES


def _only_reads(module: nn.Module) -> bool:
    is_graph = isinstance(module, (fx.GraphModule, torch.jit.ScriptModule))
    inplace = getattr(module, "inplace", False)
    return type(module).__module__.split(".")[0] in _LIBRARIES and not is_graph and not inplace


_LIBRARIES = {"torch", "torchrec", "recfx", "_operator", "builtins", "math"}


def same_memory(node: Any) -> set[fx.Node]:
    """The node, and the values in whose memory its ids may be."""
    found: set[fx.Node] = set()
    while isinstance(node, fx.Node) and node not in found:
        found.add(node)
        if node.target in _MAKERS:
            place = _MAKERS[node.target]
            node = node.args[place] if len(node.args) > place else node.kwargs.get("values")
        elif node.op == "call_module" or name_of(node) in VIEWS:
            node = first_of(node)
        else:
            break
    return found


_MAKERS: dict[Any, int] = {KeyedJaggedTensor: 1, JaggedTensor: 0}
"""The classes of batches of ids, and the place of the ids among the arguments."""
