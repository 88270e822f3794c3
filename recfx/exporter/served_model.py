"""What a file holds: the program, and the methods by which a server without Python calls it.

``forward`` takes the tensors and KJTs of the model's arguments, and returns what the model does, if TorchScript has a
type for it. ``named`` returns its tensors by name. ``serve`` also takes plain tensors by name, for callers that cannot
make a KJT.
"""

from __future__ import annotations

import itertools
import linecache
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.exporter.arguments import Pattern, Signature
from recfx.exporter.serving.named_inputs import NamedFeatures, NamedJagged, NamedTensor

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


def names_of(leaf: Pattern) -> list[str]:
    """The names under which ``serve`` takes the tensors of an argument."""
    parts = ["values", "lengths", *(["weights"] if leaf.is_weighted else [])]
    if leaf.kind == "tensor":
        return [leaf.name]
    if leaf.kind == "jagged":
        return [f"{leaf.name}.{part}" for part in parts]
    return [f"{leaf.name}.{key}.{part}" for key in leaf.keys for part in parts]


def named_input(leaf: Pattern) -> nn.Module:
    """Takes an argument out of the tensors that ``serve`` is given."""
    if leaf.kind == "tensor":
        return NamedTensor(leaf.name, **(leaf.value or {}))  # a loaded manifest may lack it
    if leaf.kind == "jagged":
        return NamedJagged(leaf.name, leaf.is_weighted)
    return NamedFeatures(leaf.name, leaf.keys, leaf.is_weighted)


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
