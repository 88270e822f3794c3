"""A file of format ``pt2``, called like a TorchScript file: with tensors and KJTs, or with plain tensors by name."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.pt2_archive._package import load_pt2

from recfx.exporter.arguments import Signature
from recfx.exporter.flat_tensors import flat_tensors
from recfx.exporter.model_file import ModelFile
from recfx.exporter.served_model import named_input, names_of


def load_traced(file: ModelFile, signature: Signature) -> LoadedProgram:
    """Load a program.

    Args:
        file: the file, whose checksums are right.
        signature: its arguments, from the manifest.

    Raises:
        ExportError: ``damaged_file``: it holds more than ``export`` writes.
        RuntimeError: torch cannot read it.
    """
    _refuse_pickles(file)
    file.file.seek(0)
    try:
        exported = load_pt2(file.file).exported_programs["model"]  # torch.export.load keeps its errors to itself
        return LoadedProgram(exported, signature)
    except (KeyError, ValueError, AssertionError) as error:  # of a program of another version of torch
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _refuse_pickles(file: ModelFile) -> None:
    """``export`` writes tensors as bytes and no sample inputs; torch would unpickle others, which runs their code."""
    with file.archive() as archive:
        for info in archive.infolist():
            if info.filename.endswith("_config.json"):
                try:
                    payloads = json.loads(archive.read(info)).get("config", {})
                    is_pickled = any(payload.get("use_pickle") for payload in payloads.values())
                except (ValueError, AttributeError) as error:
                    raise file.damaged(f"its record {info.filename} is not one that recfx writes") from error
                if is_pickled:
                    raise file.damaged(f"its record {info.filename} names pickled objects")
            elif info.filename.endswith(".pt") and info.file_size:
                raise file.damaged(f"its record {info.filename} is a pickle")


class LoadedProgram(nn.Module):
    """A program of ``torch.export``.

    Args:
        exported: the program.
        signature: its arguments, before they are taken apart into tensors.

    Attributes:
        exported: the program itself.
    """

    def __init__(self, exported: ExportedProgram, signature: Signature) -> None:
        super().__init__()
        self.exported = exported
        self.program = exported.module()
        self._signature = signature
        self._inputs = [named_input(leaf) for leaf in signature.leaves()]
        self._names = {name for leaf in signature.leaves() for name in names_of(leaf)}
        placeholders = exported.graph.find_nodes(op="placeholder")
        user_inputs = exported.graph_signature.user_inputs
        self._examples = {node.name: node.meta["val"] for node in placeholders if node.name in user_inputs}

    def named(self, *leaves: Any) -> dict[str, torch.Tensor]:
        """The output tensors by name.

        Args:
            leaves: the tensors and KJTs of the model's arguments, in order.

        Raises:
            RuntimeError: the batch is malformed; the message ends with a reason code in brackets.
        """
        flat = flat_tensors(self._signature, list(leaves))
        for tensor, (name, example) in zip(flat, self._examples.items(), strict=True):
            self._check(name, tensor, example)
        found: dict[str, torch.Tensor] = self.program(*flat)
        return found

    def serve(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The output tensors by name, for plain tensors by name.

        Raises:
            RuntimeError: as for ``named``.
        """
        for name in inputs:
            if name not in self._names:
                raise RuntimeError(f"there is no input {name} [unknown_input]")
        return self.named(*(take(inputs) for take in self._inputs))

    def train(self, mode: bool = True) -> LoadedProgram:
        """Nothing: the program is what it was in eval mode."""
        return self

    @staticmethod
    def _check(name: str, tensor: torch.Tensor, example: torch.Tensor) -> None:
        """Refuse a tensor of another dtype, or of another size where the program has a constant."""
        fits = tensor.dtype == example.dtype and tensor.dim() == example.dim()
        if fits:
            sizes = zip(tensor.shape, example.shape, strict=True)
            fits = all(size == wanted for size, wanted in sizes if isinstance(wanted, int))
        if not fits:
            wanted = ", ".join(str(size) if isinstance(size, int) else "any" for size in example.shape)
            raise RuntimeError(
                f"{name} is {tensor.dtype} of sizes {list(tensor.shape)}, but the program takes {example.dtype} of "
                f"sizes [{wanted}] [wrong_argument]"
            )
