"""What an export makes before it is written: a program in one of the formats, which is filled, saved and compared."""

from __future__ import annotations

import io
import itertools
import linecache
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.errors import Diagnostic
from recfx.exporter.arguments import Pattern, Signature
from recfx.exporter.buffers import Filling
from recfx.exporter.loaded_program import named_input, names_of
from recfx.exporter.model_call import ModelCall
from recfx.exporter.program import Program, compile_served, programs
from recfx.exporter.returns import expressions, tensor_names
from recfx.exporter.serving.targets import ATEN, NATIVE, SCRIPT, TRACED, TRITON, ServingTarget
from recfx.exporter.traced_artifact import traced_artifacts
from recfx.exporter.write_file import ARCHIVE_BYTES, MANIFEST, reserve
from recfx.ir.printer import format_graph

_TYPES = {"tensor": "torch.Tensor", "kjt": "KeyedJaggedTensor", "jagged": "JaggedTensor"}
_numbers = itertools.count(1)


def make_served_model(
    program: torch.jit.ScriptModule, signature: Signature, outputs: dict[str, str], passed: str = ""
) -> nn.Module:
    """The module of a file, to be compiled by TorchScript.

    Args:
        program: the compiled program.
        signature: its arguments.
        outputs: the name of each output tensor, and the expression that takes it out of ``output``.
        passed: the code of the program's arguments; "" if they are those of the signature, one after the other.
    """
    source = _source(signature.leaves(), outputs, passed)
    file = f"<recfx served model {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # where TorchScript looks for it
    scope: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "KeyedJaggedTensor": KeyedJaggedTensor,
        "JaggedTensor": JaggedTensor,
        "__name__": __name__,
    }
    exec(compile(source, file, "exec", dont_inherit=True), scope)  # TorchScript reads annotations as types
    served: nn.Module = scope["ServedModel"]()
    served.program = program
    for leaf in signature.leaves():
        served.add_module(f"take_{leaf.name}", named_input(leaf))
    names = {name: True for leaf in signature.leaves() for name in names_of(leaf)}
    served.input_names = names  # type: ignore[assignment]
    return served


def _source(leaves: list[Pattern], outputs: dict[str, str], passed: str) -> str:
    arguments = "".join(f", {leaf.name}: {_TYPES[leaf.kind]}" for leaf in leaves)
    passed = passed or ", ".join(leaf.name for leaf in leaves)
    named = ", ".join(f"self.take_{leaf.name}(inputs)" for leaf in leaves)
    returned = ", ".join(f"{name!r}: {expression}" for name, expression in outputs.items())
    return f"""class ServedModel(nn.Module):
    input_names: dict[str, bool]

    def forward(self{arguments}):
        return self.program({passed})

    @torch.jit.export
    def named(self{arguments}) -> dict[str, torch.Tensor]:
        output = self.program({passed})
        return {{{returned}}}

    @torch.jit.export
    def serve(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in inputs.keys():
            if name not in self.input_names:
                raise RuntimeError(f"there is no input {{name}} [unknown_input]")
        return self.named({named})
"""


class Artifact(Protocol):
    """A program whose big buffers are not filled."""

    @property
    def graph(self) -> str:
        """The text of its graph; "" if it has none."""
        ...

    def operators(self) -> list[str]:
        """The names of the operators that it calls, such as ``aten::add.Tensor``."""
        ...

    def buffers(self) -> dict[str, torch.Tensor]:
        """Its buffers by name."""
        ...

    def set_buffer(self, name: str, content: torch.Tensor) -> None:
        """Put another tensor in the place of a buffer."""
        ...

    def check_loading(self, fillings: list[Filling]) -> Diagnostic | None:
        """Why it could not be loaded if it were saved; None if it can."""
        ...

    def save(self, path: Path, manifest: str) -> None:
        """Save it as it is, with the text of the manifest."""
        ...

    def named(self, *leaves: Any) -> dict[str, torch.Tensor]:
        """Run it: the tensors and KJTs of the signature to output tensors by name."""
        ...


class ScriptArtifact:
    """A served model in TorchScript."""

    def __init__(self, script: torch.jit.ScriptModule, program: Program) -> None:
        self.script = script
        self.graph = "" if program.graph_module is None else format_graph(program.graph_module)
        self._size = 0

    def operators(self) -> list[str]:
        # `torch.jit.export_opnames` refuses models that a phone could not run.
        graphs = [self.script._c._get_method(name).graph.copy() for name in self.script._c._method_names()]
        kinds: set[str] = set()
        for graph in graphs:
            torch._C._jit_pass_inline(graph)
            blocks = [graph]
            while blocks:
                for node in blocks.pop().nodes():
                    kinds.add(node.kind())
                    blocks += node.blocks()
        return sorted(kinds)

    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.script.program.named_buffers())

    def set_buffer(self, name: str, content: torch.Tensor) -> None:
        *path, last = name.split(".")
        module = self.script.program
        for part in path:
            module = getattr(module, part)
        setattr(module, last, content)

    def check_loading(self, fillings: list[Filling]) -> Diagnostic | None:
        """Load the program without its big buffers. TorchScript saves names that it cannot read again."""
        for filling in fillings:
            self.set_buffer(filling.name, filling.buffer[:0].clone())  # a view would be saved with all its storage
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at each call that TorchScript is deprecated
                saved = self.script.save_to_buffer()
                torch.jit.load(io.BytesIO(saved))
                self._size = len(saved) + sum(filling.buffer.nbytes for filling in fillings)
        except RuntimeError as error:
            message = f"TorchScript cannot read what it saves: {str(error).strip().splitlines()[0]}"
            return Diagnostic("not_scriptable", "", message)
        finally:
            for filling in fillings:
                self.set_buffer(filling.name, filling.buffer)
        return None

    def save(self, path: Path, manifest: str) -> None:
        reserve(path, self._size + len(manifest) + ARCHIVE_BYTES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says at each call that TorchScript is deprecated
            try:
                torch.jit.save(self.script, str(path), _extra_files={MANIFEST: manifest})
            except RuntimeError as error:  # what torch makes of an error of the disk
                raise OSError(f"torch cannot save it: {str(error).strip().splitlines()[0]}") from error

    def named(self, *leaves: Any) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = self.script.named(*leaves)
        return outputs


def script_artifacts(call: ModelCall) -> Iterator[ScriptArtifact]:
    """The model in TorchScript."""
    for program in programs(call):
        if program.returns_typed:
            returned = expressions(call.returns)
        else:
            returned = {name: f"output[{name!r}]" for name in tensor_names(call.returns)}
        script = compile_served(make_served_model(program.script, call.signature, returned, program.passed).eval())
        if isinstance(script, Diagnostic):
            call.failures.append(script)
        else:
            yield ScriptArtifact(script, program)


@dataclass(frozen=True)
class FileFormat:
    """A format of ``export``.

    Args:
        target: the modules of its nodes on the CPU.
        elsewhere: those on other devices; None if its files run on the CPU alone.
        make: makes what may become the file, in one way after the other.
        compiler: what makes it, for messages.
        reason: the code of the error if that cannot.
        native: the modules of its nodes if the file may use recfx's operators; None if it may not.
        elsewhere_native: the same on other devices.
    """

    target: ServingTarget
    elsewhere: ServingTarget | None
    make: Callable[[ModelCall], Iterator[Artifact]]
    compiler: str
    reason: str
    native: ServingTarget | None = None
    elsewhere_native: ServingTarget | None = None


FILE_FORMATS = {
    "torchscript": FileFormat(SCRIPT, ATEN, script_artifacts, "TorchScript", "not_scriptable", NATIVE, TRITON),
    "pt2": FileFormat(TRACED, None, traced_artifacts, "torch.export", "not_exportable"),
}
"""The formats by name."""
