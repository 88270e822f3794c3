"""A file of format ``pt2``, called like a TorchScript file: with tensors and KJTs, or with plain tensors by name. Its
program takes tensors only: of a KJT, int64 ids ``[n]``, int64 lengths ``[F, B]``, and float32 weights ``[n]``, if any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from recfx.errors import ExportError
from recfx.exporter.arguments import Signature
from recfx.exporter.model_file import ModelFile
from recfx.exporter.patterns import Pattern, identifier
from recfx.exporter.serving.named_inputs import NamedFeatures, NamedTensor
from recfx.exporter.serving.select_bags import SelectBags
from recfx.versions.differences import pt2_reader

_RESERVED = ("device", "pytree", "fx_pytree")
"""Names that the code of a program of ``torch.export`` needs itself."""


def flat_names(signature: Signature) -> list[str]:
    """The names of the traced program's arguments."""
    names: list[str] = []
    for leaf in signature.leaves():
        for part in leaf.parts:
            names.append(identifier(f"{leaf.name}_{part}" if part else leaf.name, [*names, *_RESERVED]))
    return names


def flat_tensors(signature: Signature, leaves: list[Any]) -> list[torch.Tensor]:
    """The traced program's arguments for the tensors and KJTs of one call, checked as those of other files."""
    flat: list[torch.Tensor] = []
    for leaf, value in zip(signature.leaves(), leaves, strict=True):
        if leaf.kind == "tensor":
            flat.append(value)
            continue
        weights = value.weights_or_none()
        if leaf.is_weighted and weights is not None and weights.dtype in (torch.float64, torch.int64, torch.int32):
            raise RuntimeError(f"{leaf.name}: weights must be float32, got {weights.dtype} [wrong_dtype]")
        select = SelectBags(leaf.name, (), leaf.is_weighted)
        select.feature_names = list(leaf.keys)
        bags = select(value)
        lengths = bags.lengths.view(len(leaf.keys), -1).long()
        flat += [bags.values, lengths, *([bags.weights.float()] if leaf.is_weighted else [])]
    return flat


def check_reads_pt2() -> Callable[..., Any]:
    """What reads files of format ``pt2``; they are refused where torch lays them out differently (``no_pt2``)."""
    read = pt2_reader()
    if read is None:
        raise ExportError(
            f"torch {torch.__version__} keeps programs of torch.export as pickles, in another layout.",
            reason="no_pt2",
            what_to_do="use torch 2.9 or newer for files of format pt2, or export with format='torchscript'.",
        )
    return read


def load_traced(file: ModelFile, signature: Signature) -> LoadedProgram:
    """Load a program from a file whose checksums are right."""
    read = check_reads_pt2()
    file.file.seek(0)
    try:
        exported = read(file.file).exported_programs["model"]  # torch.export.load keeps its errors to itself
        return LoadedProgram(exported, signature)
    except (KeyError, ValueError, AssertionError) as error:  # the program is of another version of torch
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


class LoadedProgram(nn.Module):
    """A program of ``torch.export``, and its arguments before they are taken apart into tensors."""

    def __init__(self, exported: ExportedProgram, signature: Signature) -> None:
        super().__init__()
        self.exported = exported
        self.program = exported.module()
        self._signature = signature
        self._inputs = [named_input(leaf) for leaf in signature.leaves()]
        placeholders = exported.graph.find_nodes(op="placeholder")
        user_inputs = exported.graph_signature.user_inputs
        self._examples = {node.name: node.meta["val"] for node in placeholders if node.name in user_inputs}

    def named(self, *leaves: Any) -> dict[str, torch.Tensor]:
        """The output tensors by name, for the tensors and KJTs of the model's arguments, in order."""
        flat = flat_tensors(self._signature, list(leaves))
        for tensor, (name, example) in zip(flat, self._examples.items(), strict=True):
            _check(name, tensor, example)
        outputs: dict[str, torch.Tensor] = self.program(*flat)
        return outputs

    def serve(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The output tensors by name, for plain tensors by name."""
        return self.named(*(take(inputs) for take in self._inputs))


def _check(name: str, tensor: torch.Tensor, example: torch.Tensor) -> None:
    """Refuse a tensor of another rank or dtype, or of another size where the program has a constant."""
    sizes = zip(tensor.shape, example.shape, strict=False)
    unlike = {
        "wrong_rank": tensor.dim() != example.dim(),
        "wrong_dtype": tensor.dtype != example.dtype,
        "wrong_size": any(size != expected for size, expected in sizes if isinstance(expected, int)),
    }
    if reason := next((code for code, is_unlike in unlike.items() if is_unlike), ""):
        expected = ", ".join(str(size) if isinstance(size, int) else "any" for size in example.shape)
        raise RuntimeError(
            f"{name} is {tensor.dtype} of sizes {list(tensor.shape)}, but the program takes {example.dtype} of sizes "
            f"[{expected}] [{reason}]"
        )


def names_of(leaf: Pattern) -> list[str]:
    """The names under which ``serve`` takes the tensors of an argument."""
    if leaf.kind == "tensor":
        return [leaf.name]
    return [f"{leaf.name}.{key}.{part}" for key in leaf.keys for part in leaf.parts]


def named_input(leaf: Pattern) -> nn.Module:
    """Takes an argument out of the tensors that ``serve`` is given."""
    if leaf.kind == "tensor":
        return NamedTensor(leaf.name, **(leaf.value or {}))  # a loaded manifest may lack it
    return NamedFeatures(leaf.name, leaf.keys, leaf.is_weighted)
