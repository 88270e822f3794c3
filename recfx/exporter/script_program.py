"""The exported program in TorchScript: a trace of the model in eval mode, around its collections' exported graphs.
Modules that cannot be traced, such as those with branches that depend on data, are compiled from their own code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import linecache
import re
import sys
import types
import typing
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.jit._recursive import create_script_module, infer_methods_to_compile
from torch.jit._script import call_prepare_scriptable_func
from torchrec.sparse import jagged_tensor

from recfx.collections.copy_modules import own_modules
from recfx.errors import Diagnostic, Severity
from recfx.exporter.compare_outputs import ModelCall
from recfx.exporter.loaded_program import named_input, names_of
from recfx.exporter.model_copies import detach_parameters, fold_parametrizations
from recfx.exporter.model_file import Program
from recfx.exporter.patterns import Pattern, expressions, identifier, is_typed, tensor_names
from recfx.exporter.serving.select_bags import ServedNode
from recfx.exporter.trace_model import WayFailed, trace_model, warmed
from recfx.ir.printer import format_graph
from recfx.runtime.base import MODULE_HOOKS, has_forward_hooks

_TYPES = {"tensor": "torch.Tensor", "kjt": "KeyedJaggedTensor"}
_CLASSES = ("KeyedJaggedTensor", "KeyedTensor", "JaggedTensor")
_numbers = itertools.count(1)


@contextlib.contextmanager
def _undeprecated() -> Iterator[None]:
    """A context without torch's word, at each call, that TorchScript is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def script_programs(call: ModelCall) -> Iterator[Program | Diagnostic]:
    """The compiled graph of a model around exported collections, or why there is none."""
    call = warmed(call)
    fold_parametrizations(call.model)
    paths: dict[str, str] = {}
    rollbacks: dict[str, str] = {}
    try:
        graph_module, paths, rollbacks = trace_model(call)
        message = "TorchScript compiles the module's own code, so its forward hooks are not in the file."
        what_to_do = "if the answer needs them, call what they do in `forward`."
        left_out = [
            Diagnostic("hooks_left_out", paths.get(path, path), message, what_to_do, Severity.WARNING)
            for path, module in graph_module.named_modules()
            if has_forward_hooks(module)
        ]
        served: Any = _served_model(_script(graph_module), call)
        size = _saved_size(served, [filling.buffer for each in call.served.values() for filling in each.fillings])
    except WayFailed as failed:
        why = failed.diagnostic
        path = paths.get(why.path, why.path)
        untraced = f"it cannot be traced ({rollbacks[path]}), nor compiled: " if path in rollbacks else ""
        yield dataclasses.replace(why, path=path, message=f"{untraced}{why.message}")
        return
    call.failures.extend(left_out)
    inner = served.program.program
    yield Program(
        named=served.named, save=partial(save_script, served), size=size, operators=_operators(served),
        buffers=lambda: dict(inner.named_buffers(remove_duplicate=False)), graph=format_graph(graph_module),
        paths=paths, parameters=lambda: dict(inner.named_parameters(remove_duplicate=False)),
        attributes=partial(_attributes, inner),
    )  # fmt: skip


def save_script(script: torch.jit.ScriptModule, path: Path) -> None:
    """Save a module, where an error of the disk is an ``OSError``."""
    try:
        with _undeprecated():
            torch.jit.save(script, str(path))
    except RuntimeError as error:  # what torch makes of an error of the disk
        raise OSError(f"torch cannot save it: {str(error).strip().splitlines()[0]}") from error


class _Tensors(nn.Module):
    def forward(self) -> None:
        return None


def script_of_tensors(tensors: dict[str, torch.Tensor]) -> torch.jit.ScriptModule:
    """A module that holds tensors by name, and computes nothing."""
    module = _Tensors()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return _compile(module)


def _saved_size(script: torch.jit.ScriptModule, big: list[torch.Tensor]) -> int:
    """How many bytes it has when it is saved. It is saved, and loaded again if it can be, without its big buffers."""
    contents = [buffer.detach() for buffer in big]
    for buffer in big:
        buffer.set_()  # type: ignore[call-overload]  # to an empty tensor
    try:
        with _undeprecated():
            saved = script.save_to_buffer()
            torch.jit.load(io.BytesIO(saved))
    except RuntimeError as error:
        message = f"TorchScript cannot read what it saves: {str(error).strip().splitlines()[0]}"
        raise WayFailed(Diagnostic("not_scriptable", "", message)) from error
    finally:
        for buffer, content in zip(big, contents, strict=True):
            buffer.set_(content)  # type: ignore[call-overload]
    return len(saved) + sum(content.nbytes for content in contents)


def _attributes(program: torch.jit.ScriptModule) -> dict[str, Any]:
    """What the code of a compiled program reads of its modules, by path, besides parameters and buffers."""
    modules = list(program.named_modules(remove_duplicate=False))
    methods = (module._c._get_method(name) for _, module in modules for name in module._c._method_names())
    read = {node.s("name") for method in methods for node in method.graph.findAllNodes("prim::GetAttr")}
    held: dict[str, Any] = {}
    for path, module in modules:
        registered = dict([*module.named_parameters(), *module.named_buffers()])
        for name in (module._concrete_type.get_attributes().keys() & read) - registered.keys():
            held[f"{path}.{name}" if path else name] = getattr(module, name)
    return held


def _operators(script: torch.jit.ScriptModule) -> set[str]:
    """The names of the operators that it calls; ``torch.jit.export_opnames`` refuses what a phone could not run."""
    kinds: set[str] = set()
    for name in script.program._c._method_names():
        graph = script.program._c._get_method(name).graph.copy()
        torch._C._jit_pass_inline(graph)
        blocks = [graph]
        while blocks:
            for node in blocks.pop().nodes():
                kinds.add(node.kind())
                blocks += node.blocks()
    return kinds


def _script(graph_module: fx.GraphModule) -> torch.jit.ScriptModule:
    """Compile a graph, and before it the modules that it calls, one by one, so that an error names the module."""
    modules = own_modules(graph_module)
    for module in modules:
        for name in MODULE_HOOKS:
            if isinstance(module.__dict__.get(name), dict):
                module.__dict__[name] = type(module.__dict__[name])()
    detach_parameters(modules)
    for path in dict.fromkeys(str(node.target) for node in graph_module.graph.find_nodes(op="call_module")):
        module = graph_module.get_submodule(path)
        if not isinstance(module, (ServedNode, torch.jit.ScriptModule)):
            graph_module.add_submodule(path, _compile(module, path))
    return _compile(graph_module).eval()


def _compile(module: nn.Module, path: str = "") -> torch.jit.ScriptModule:
    """``torch.jit.script``, but with types of its own: a class that failed once could never be compiled again."""
    try:
        with _undeprecated():
            prepared = call_prepare_scriptable_func(module)
            script: torch.jit.ScriptModule = create_script_module(prepared, infer_methods_to_compile, share_types=False)
    except Exception as error:  # the compiler raises errors of many types, about the user's code
        raise WayFailed(Diagnostic("not_scriptable", path, _summary(error))) from error
    return script


def _summary(error: Exception) -> str:
    """What the compiler says, and the line of the user's code that it points at."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip(" :")]
    texts = [line for line in lines if not line.startswith('File "') and "~" not in line]
    if texts and re.fullmatch(r"\S+\(.*\) -> .*:", texts[0]):  # the signature of what is called comes before the reason
        texts = [line for line in texts[1:] if line.startswith(("Expected", "Inferred"))] or texts
        message = " ".join(texts)
    else:
        message = texts[0] if texts else ""
    message = re.sub(r" \(of Python compilation unit at: 0x[0-9a-f]+\)|__torch__\.(\w+\.)*", "", message)
    where = next((line for line in lines if line.startswith('File "')), "")
    return f"{type(error).__name__}: {message} {where}".strip()


def _served_model(program: torch.jit.ScriptModule, call: ModelCall) -> torch.jit.ScriptModule:
    """The compiled module of a file, around the compiled program; its ``forward`` returns what the program does.

    TorchScript's fuser compiles kernels for the sizes that it sees in the first run of a method, and on CUDA it fails
    if one of them is 0. A method that is called through an interface has runs of its own. So every call first calls
    such a method as a rehearsal, which returns at once: the fuser has seen no sizes then, and takes nothing, whatever
    loads the file, and in whatever order batches come.
    """
    names, leaves = tensor_names(call.returns), call.signature.leaves()
    # What TorchScript has no type for, a program returns as tensors by name.
    outputs = expressions(call.returns) if is_typed(call.returns) else {name: f"output[{name!r}]" for name in names}
    source = _source(leaves, outputs, _returned_type(program), call.forward)
    module: Any = types.ModuleType("recfx_served_model")
    # TorchScript looks for the source of a class in the file of its module.
    module.__file__ = f"<recfx served model {next(_numbers)}>"
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
    scope: dict[str, Any] = module.__dict__
    scope |= {name: getattr(jagged_tensor, name) for name in _CLASSES}
    scope |= {name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Tuple")}
    scope |= {"torch": torch, "nn": nn, "Tensor": torch.Tensor, "NoneType": type(None)}
    sys.modules[module.__name__] = module  # only meanwhile
    try:
        exec(compile(source, module.__file__, "exec", dont_inherit=True), scope)  # it reads annotations as types
        rehearsed: nn.Module = scope["Rehearsed"]()
        rehearsed.program = program
        for leaf in leaves:
            rehearsed.add_module(f"take_{leaf.name}", named_input(leaf))
        served: nn.Module = scope["ServedModel"]()
        served.program = _compile(rehearsed.eval())
        served.input_names = {name: True for leaf in leaves for name in names_of(leaf)}  # type: ignore[assignment]
        return _compile(served.eval())
    finally:
        del sys.modules[module.__name__]


def _returned_type(program: torch.jit.ScriptModule) -> str:
    """The type that the program returns, as an annotation: Any if it has classes that a source cannot name."""
    returned = program._c._get_method("forward").schema.returns[0].type.annotation_str
    named: str = re.sub(rf"__torch__\.torchrec\.sparse\.jagged_tensor\.({'|'.join(_CLASSES)})\b", r"\1", returned)
    return "Any" if "__torch__" in named else named


def _forward(leaves: list[Pattern], outputs: list[str], takes: str) -> str:
    """The ``forward`` of a file that takes tensors, and returns a tensor, or a tuple of them, in order."""
    names = [name for leaf in leaves for name in names_of(leaf)]
    taken: list[str] = []
    for name in names:
        taken.append(identifier(name, [*taken, "self", "inputs", "outputs"]))
    named = ", ".join(f"{name!r}: {argument}" for name, argument in zip(names, taken, strict=True))
    by_position = "".join(f", {argument}: torch.Tensor" for argument in taken)
    arguments = ", inputs: dict[str, torch.Tensor]" if takes == "tensors" else by_position
    inputs = "inputs" if takes == "tensors" else f"{{{named}}}"
    returned = ", ".join(f"outputs[{name!r}]" for name in outputs)
    return f"""def forward(self{arguments}):
        outputs = self.serve({inputs})
        return {returned}"""


def _source(leaves: list[Pattern], outputs: dict[str, str], type_name: str, takes: str) -> str:
    arguments = "".join(f", {leaf.name}: {_TYPES[leaf.kind]}" for leaf in leaves)
    passed = ", ".join(leaf.name for leaf in leaves)
    rehearsal, answers = (identifier(name, [leaf.name for leaf in leaves]) for name in ("rehearsal", "answers"))
    named = ", ".join(f"self.take_{leaf.name}(inputs)" for leaf in leaves)
    returned = ", ".join(f"{name!r}: {expression}" for name, expression in outputs.items())
    of_named = f"(self, {rehearsal}: bool{arguments}) -> dict[str, torch.Tensor]"
    of_answers = f"(self, {rehearsal}: bool{arguments}) -> list[{type_name}]"
    forward = f"""def forward(self{arguments}):
        self.program.answers(True, {passed})
        return self.program.answers(False, {passed})[0]"""
    if takes != "model":
        forward = _forward(leaves, list(outputs), takes)
    return f"""@torch.jit.interface
class Program(nn.Module):
    def answers{of_answers}: pass
    def named{of_named}: pass
    def serve(self, rehearsal: bool, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]: pass

class Rehearsed(nn.Module):
    @torch.jit.export
    def answers{of_answers}:
        {answers} = torch.jit.annotate(list[{type_name}], [])
        if not {rehearsal}:
            {answers}.append(self.program({passed}))
        return {answers}
    @torch.jit.export
    def named{of_named}:
        if {rehearsal}:
            return torch.jit.annotate(dict[str, torch.Tensor], {{}})
        output = self.program({passed})
        return {{{returned}}}
    @torch.jit.export
    def serve(self, rehearsal: bool, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if rehearsal:
            return torch.jit.annotate(dict[str, torch.Tensor], {{}})
        return self.named(False, {named})

class ServedModel(nn.Module):
    program: Program
    input_names: dict[str, bool]
    {forward}
    @torch.jit.export
    def named(self{arguments}) -> dict[str, torch.Tensor]:
        self.program.named(True, {passed})
        return self.program.named(False, {passed})
    @torch.jit.export
    def serve(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in inputs.keys():
            if name not in self.input_names:
                raise RuntimeError(f"there is no input {{name}} [unknown_input]")
        self.program.serve(True, inputs)
        return self.program.serve(False, inputs)
"""
