"""The exported program: the model's code in eval mode, around the exported graphs of its collections, in TorchScript.

Two ways lead to it: a trace of the model, and, where no trace leads to a program, the model's own code, which keeps
branches that depend on data.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.jit._recursive import create_script_module, infer_methods_to_compile
from torch.jit._script import call_prepare_scriptable_func

from recfx.collections.object_kinds import own_modules
from recfx.errors import Diagnostic, Severity
from recfx.exporter.arguments import Signature
from recfx.exporter.model_call import ModelCall
from recfx.exporter.model_copies import detach_parameters, fold_parametrizations, fresh_copy, strip_hooks
from recfx.exporter.returns import is_typed
from recfx.exporter.serving.select_bags import ServedNode
from recfx.exporter.trace_model import PATHS, ROLLBACKS, WayFailed, Ways, each_way, trace_model, warmed
from recfx.runtime.hooks import has_forward_hooks


@dataclass(frozen=True)
class Program:
    """A program that TorchScript has compiled.

    Args:
        script: takes the arguments of the signature, one after the other.
        graph_module: the graph that was compiled; None if it was the model's own code.
        returns_typed: whether it returns what the model does; otherwise, the tensors in it by name.
        passed: the code of its arguments, where the arguments of the signature are variables; "" if it takes just
            these.
    """

    script: torch.jit.ScriptModule
    graph_module: fx.GraphModule | None
    returns_typed: bool
    passed: str = ""


def programs(call: ModelCall) -> Iterator[Program]:
    """Compile a model around exported collections, in one way after the other."""
    call = warmed(call)
    fold_parametrizations(call.model)
    yield from each_way(partial(_trace_and_compile, call), call.failures)
    try:
        program = Program(_script(_plain_root(call)), None, True, _passed(call.signature))
    except WayFailed as failed:
        call.failures.append(failed.diagnostic)
    else:
        call.failures.extend(_hooks_left_out(call.model, {}))
        yield program


def _trace_and_compile(call: ModelCall, ways: Ways) -> Program:
    graph_module = trace_model(call, ways)
    left_out = _hooks_left_out(graph_module, graph_module.meta[PATHS])
    try:
        program = Program(_script(graph_module), graph_module, is_typed(call.returns))
    except WayFailed as failed:
        why = failed.diagnostic
        path = graph_module.meta[PATHS].get(why.path, why.path)
        rollback = graph_module.meta[ROLLBACKS].get(path)
        untraced = "" if rollback is None else f"it cannot be traced ({rollback}), nor compiled: "
        named = dataclasses.replace(why, path=path, message=f"{untraced}{why.message}")
        raise WayFailed(named, failed.stage) from failed
    call.failures.extend(left_out)
    return program


def _hooks_left_out(root: nn.Module, paths: Mapping[str, str]) -> list[Diagnostic]:
    """The forward hooks of modules whose code TorchScript compiles; ``paths`` are those in the user's model."""
    what_to_do = "if the answer needs them, call what they do in `forward`."
    message = "TorchScript compiles the module's own code, so its forward hooks are not in the file."
    return [
        Diagnostic("hooks_left_out", paths.get(path, path), message, what_to_do, Severity.WARNING)
        for path, module in root.named_modules()
        if has_forward_hooks(module)
    ]


def _plain_root(call: ModelCall) -> nn.Module:
    """The model's own code around exported collections."""
    exploded = [pattern for pattern in call.signature.patterns if not pattern.name]
    if any(pattern.kind != "constant" for pattern in exploded):
        message = f"TorchScript has no type for an argument that is a {exploded[0].kind}"
        raise WayFailed(Diagnostic("not_scriptable", "", message), "compile")
    return fresh_copy(call.model, call.served)[0]


def _passed(signature: Signature) -> str:
    """The arguments of the model's own code for the sample's: by name where the sample gives them so."""
    values = [pattern.name or _literal(pattern.value) for pattern in signature.patterns]
    named = zip(signature.parameters[signature.positional :], values[signature.positional :], strict=True)
    return ", ".join([*values[: signature.positional], *(f"{name}={value}" for name, value in named)])


def _literal(value: Any) -> str:
    is_written_so = not isinstance(value, float) or math.isfinite(value)
    return repr(value) if is_written_so else f"float({str(value)!r})"


def _script(module: nn.Module) -> torch.jit.ScriptModule:
    modules = own_modules(module)
    strip_hooks(modules)
    detach_parameters(modules)
    if isinstance(module, fx.GraphModule):
        _script_leaves(module)
    return _compile(module, "", "compile").eval()


def _script_leaves(graph_module: fx.GraphModule) -> None:
    """Compile the modules that a graph calls, one by one, so that an error names the module."""
    for path in dict.fromkeys(str(node.target) for node in graph_module.graph.find_nodes(op="call_module")):
        module = graph_module.get_submodule(path)
        if not isinstance(module, (ServedNode, torch.jit.ScriptModule)):
            graph_module.add_submodule(path, _compile(module, path, "leaf"))


def _compile(module: nn.Module, path: str, stage: str) -> torch.jit.ScriptModule:
    try:
        return compile_module(module)
    except Exception as error:  # the compiler raises errors of many types, about the user's code
        raise WayFailed(Diagnostic("not_scriptable", path, _summary(error)), stage) from error


def compile_served(module: nn.Module) -> torch.jit.ScriptModule | Diagnostic:
    """The compiled served model, or why it does not compile."""
    try:
        return _compile(module, "", "compile")
    except WayFailed as failed:
        return failed.diagnostic


def compile_module(module: nn.Module) -> torch.jit.ScriptModule:
    """``torch.jit.script``, with types that no other compilation shares.

    Otherwise a class that failed to compile once could never be compiled again in this process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at each call that TorchScript is deprecated
        prepared = call_prepare_scriptable_func(module)
        script: torch.jit.ScriptModule = create_script_module(prepared, infer_methods_to_compile, share_types=False)
    return script


def _summary(error: Exception) -> str:
    """What the compiler says, and the line of the user's code that it points at."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip(" :")]
    said = [line for line in lines if not line.startswith('File "') and "~" not in line]
    if said and re.fullmatch(r"\S+\(.*\) -> .*:", said[0]):  # the signature of what is called comes before the reason
        said = [line for line in said[1:] if line.startswith(("Expected", "Inferred"))] or said
    else:
        said = said[:1]
    told = re.sub(r" \(of Python compilation unit at: 0x[0-9a-f]+\)|__torch__\.(\w+\.)*", "", " ".join(said))
    where = next((line for line in lines if line.startswith('File "')), "")
    return f"{type(error).__name__}: {told} {where}".strip()
