"""The exported program: the model's code in eval mode, around the exported graphs of its collections, in TorchScript.

Two ways lead to it: a trace of the model, and, where no trace leads to a program, the model's own code, which keeps
branches that depend on data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import linecache
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.jit._recursive import create_script_module, infer_methods_to_compile
from torch.jit._script import call_prepare_scriptable_func
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.collections.copy_modules import own_modules
from recfx.errors import Diagnostic, Severity
from recfx.exporter.arguments import Signature
from recfx.exporter.buffers import Filling
from recfx.exporter.loaded_program import named_input, names_of
from recfx.exporter.model_call import ModelCall
from recfx.exporter.model_copies import detach_parameters, fold_parametrizations, fresh_copy, strip_hooks
from recfx.exporter.model_file import Program
from recfx.exporter.patterns import Pattern, as_in_file
from recfx.exporter.returns import expressions, is_as_exported, is_typed, tensor_names
from recfx.exporter.serving.select_bags import ServedNode
from recfx.exporter.trace_model import WayFailed, trace_model, warmed
from recfx.ir.printer import format_graph
from recfx.runtime.base import has_forward_hooks

_TYPES = {"tensor": "torch.Tensor", "kjt": "KeyedJaggedTensor"}
_numbers = itertools.count(1)


@contextlib.contextmanager
def _undeprecated() -> Iterator[None]:
    """A context without torch's word, at each call, that TorchScript is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def script_programs(call: ModelCall) -> Iterator[Program]:
    """Compile a model around exported collections: the graph of a trace, and then its own code."""
    call = warmed(call)
    fold_parametrizations(call.model)
    for way in (_traced, _own_code):
        try:
            program = way(call)
        except WayFailed as failed:
            call.failures.append(failed.diagnostic)
        else:
            yield program


def _traced(call: ModelCall) -> Program:
    graph_module, paths, rollbacks = trace_model(call)
    left_out = _hooks_left_out(graph_module, paths)
    try:
        script = _script(graph_module)
    except WayFailed as failed:
        why = failed.diagnostic
        path = paths.get(why.path, why.path)
        untraced = f"it cannot be traced ({rollbacks[path]}), nor compiled: " if path in rollbacks else ""
        raise WayFailed(dataclasses.replace(why, path=path, message=f"{untraced}{why.message}")) from failed
    program = _program(script, call, graph_module, is_typed(call.returns))
    call.failures.extend(left_out)
    return program


def _own_code(call: ModelCall) -> Program:
    program = _program(_script(_plain_root(call)), call, None, is_typed=True, passed=_passed(call.signature))
    call.failures.extend(_hooks_left_out(call.model, {}))
    return program


def _program(
    script: torch.jit.ScriptModule,
    call: ModelCall,
    graph_module: fx.GraphModule | None,
    is_typed: bool,
    passed: str = "",
) -> Program:
    """The program of a file; for the last arguments, see ``_served_model``."""
    served: Any = _served_model(script, call, is_typed, passed)
    return Program(
        named=served.named,
        save=partial(_save, served),
        size=_saved_size(served, [filling for collection in call.served.values() for filling in collection.fillings]),
        operators=_operators(served),
        buffers=lambda: dict(served.program.named_buffers()),
        graph="" if graph_module is None else format_graph(graph_module),
    )


def _save(script: torch.jit.ScriptModule, path: Path) -> None:
    try:
        with _undeprecated():
            torch.jit.save(script, str(path))
    except RuntimeError as error:  # what torch makes of an error of the disk
        raise OSError(f"torch cannot save it: {str(error).strip().splitlines()[0]}") from error


def _saved_size(script: torch.jit.ScriptModule, fillings: list[Filling]) -> int:
    """How many bytes it has when it is saved. It is saved and loaded without its big buffers.

    Raises:
        WayFailed: TorchScript saves names that it cannot read again.
    """
    contents = [filling.buffer.detach() for filling in fillings]
    for filling in fillings:
        filling.buffer.set_()  # type: ignore[call-overload]  # to an empty tensor
    try:
        with _undeprecated():
            saved = script.save_to_buffer()
            torch.jit.load(io.BytesIO(saved))
    except RuntimeError as error:
        message = f"TorchScript cannot read what it saves: {str(error).strip().splitlines()[0]}"
        raise WayFailed(Diagnostic("not_scriptable", "", message)) from error
    finally:
        for filling, content in zip(fillings, contents, strict=True):
            filling.buffer.set_(content)  # type: ignore[call-overload]
    return len(saved) + sum(content.nbytes for content in contents)


def _operators(script: torch.jit.ScriptModule) -> set[str]:
    """The names of the operators that it calls; ``torch.jit.export_opnames`` refuses what a phone could not run."""
    kinds: set[str] = set()
    for name in script._c._method_names():
        graph = script._c._get_method(name).graph.copy()
        torch._C._jit_pass_inline(graph)
        blocks = [graph]
        while blocks:
            for node in blocks.pop().nodes():
                kinds.add(node.kind())
                blocks += node.blocks()
    return kinds


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
        raise WayFailed(Diagnostic("not_scriptable", "", message))
    return fresh_copy(call.model, call.graphs)[0]


def _passed(signature: Signature) -> str:
    """The code that passes arguments to the model: by name where the sample does so."""
    values = [pattern.name or _literal(pattern.value) for pattern in signature.patterns]
    named = zip(signature.parameters[signature.positional :], values[signature.positional :], strict=True)
    return ", ".join([*values[: signature.positional], *(f"{name}={value}" for name, value in named)])


def _literal(value: Any) -> str:
    value = as_in_file(value)
    is_written_so = not isinstance(value, float) or math.isfinite(value)
    return repr(value) if is_written_so else f"float({str(value)!r})"


def _script(module: nn.Module) -> torch.jit.ScriptModule:
    modules = own_modules(module)
    strip_hooks(modules)
    detach_parameters(modules)
    if isinstance(module, fx.GraphModule):
        _script_leaves(module)
    return _compile(module).eval()


def _script_leaves(graph_module: fx.GraphModule) -> None:
    """Compile the modules that a graph calls, one by one, so that an error names the module."""
    for path in dict.fromkeys(str(node.target) for node in graph_module.graph.find_nodes(op="call_module")):
        module = graph_module.get_submodule(path)
        if not isinstance(module, (ServedNode, torch.jit.ScriptModule)):
            graph_module.add_submodule(path, _compile(module, path))


def _compile(module: nn.Module, path: str = "") -> torch.jit.ScriptModule:
    """``torch.jit.script``, with types that no other compilation shares.

    Otherwise a class that failed to compile once could never be compiled again in this process.
    """
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


def _served_model(
    program: torch.jit.ScriptModule, call: ModelCall, is_typed: bool, passed: str = ""
) -> torch.jit.ScriptModule:
    """The compiled module of a file.

    Args:
        program: the compiled program.
        call: the call that it was made from.
        is_typed: whether it returns what the model does; otherwise, the tensors in it by name.
        passed: the code of its arguments; "" if they are those of the signature, one after the other.
    """
    names = tensor_names(call.returns)
    outputs = expressions(call.returns) if is_typed else {name: f"output[{name!r}]" for name in names}
    leaves = call.signature.leaves()
    source = _source(leaves, outputs, passed, is_as_exported(call.returns) if is_typed else [])
    file = f"<recfx served model {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # where TorchScript looks for it
    scope: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "KeyedJaggedTensor": KeyedJaggedTensor,
        "__name__": __name__,
    }
    exec(compile(source, file, "exec", dont_inherit=True), scope)  # TorchScript reads annotations as types
    served: nn.Module = scope["ServedModel"]()
    served.program = program
    for leaf in leaves:
        served.add_module(f"take_{leaf.name}", named_input(leaf))
    served.input_names = {name: True for leaf in leaves for name in names_of(leaf)}  # type: ignore[assignment]
    return _compile(served.eval())


def _source(leaves: list[Pattern], outputs: dict[str, str], passed: str, conditions: list[str]) -> str:
    arguments = "".join(f", {leaf.name}: {_TYPES[leaf.kind]}" for leaf in leaves)
    passed = passed or ", ".join(leaf.name for leaf in leaves)
    named = ", ".join(f"self.take_{leaf.name}(inputs)" for leaf in leaves)
    returned = ", ".join(f"{name!r}: {expression}" for name, expression in outputs.items())
    checks = "".join(
        f"""
        if not ({condition}):
            raise RuntimeError("the model returns something else than for the sample [unsupported_output]")"""
        for condition in conditions
    )
    return f"""class ServedModel(nn.Module):
    input_names: dict[str, bool]

    def forward(self{arguments}):
        return self.program({passed})

    @torch.jit.export
    def named(self{arguments}) -> dict[str, torch.Tensor]:
        output = self.program({passed}){checks}
        return {{{returned}}}

    @torch.jit.export
    def serve(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in inputs.keys():
            if name not in self.input_names:
                raise RuntimeError(f"there is no input {{name}} [unknown_input]")
        return self.named({named})
"""
