"""A file of format ``pt2``, called like a TorchScript file: with tensors and KJTs, or with plain tensors by name.

Programs of ``torch.export`` take tensors only. A KJT becomes int64 ids ``[n]``, int64 lengths ``[F, B]`` and, if the
sample had weights, float32 weights ``[n]``; its keys are those of the sample, in that order. A jagged tensor becomes
values, lengths ``[B]`` and weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.errors import ExportError
from recfx.exporter.arguments import Signature
from recfx.exporter.model_file import ModelFile
from recfx.exporter.patterns import Pattern, identifier
from recfx.exporter.serving.named_inputs import NamedFeatures, NamedJagged, NamedTensor, check_lengths, check_weights
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


def join_tensors(signature: Signature, tensors: Iterator[torch.Tensor]) -> Iterator[Any]:
    """The tensors and KJTs that the model takes, made of the traced program's arguments."""
    for leaf in signature.leaves():
        parts = {part: next(tensors) for part in leaf.parts}
        if leaf.kind == "tensor":
            yield parts[""]
        elif leaf.kind == "jagged":
            yield JaggedTensor(parts["values"], weights=parts.get("weights"), lengths=parts["lengths"])
        else:
            yield KeyedJaggedTensor(
                list(leaf.keys),
                parts["values"],
                parts.get("weights"),
                lengths=parts["lengths"].reshape(-1),
                stride=parts["lengths"].size(1),
            )


def flat_tensors(signature: Signature, leaves: list[Any]) -> list[torch.Tensor]:
    """The traced program's arguments for the tensors and KJTs of one call.

    Raises:
        RuntimeError: a KJT is malformed, or lacks keys or weights; the message ends with a reason code in brackets.
    """
    flat: list[torch.Tensor] = []
    for leaf, value in zip(signature.leaves(), leaves, strict=True):
        if leaf.kind == "tensor":
            flat.append(value)
            continue
        weights = value.weights_or_none()
        if leaf.is_weighted and weights is not None and weights.dtype in (torch.float64, torch.int64, torch.int32):
            raise RuntimeError(f"{leaf.name}: weights must be float32, got {weights.dtype} [wrong_dtype]")
        if leaf.kind == "jagged":
            values, lengths, weights = value.values(), value.lengths().view(-1), value.weights_or_none()
            check_lengths(leaf.name, values, lengths, False)
            if leaf.is_weighted and weights is None:
                raise RuntimeError(f"{leaf.name}: the jagged tensor has no weights [missing_weights]")
            if weights is not None and leaf.is_weighted:
                check_weights(leaf.name, values, weights)
        else:
            select = SelectBags(leaf.name, (), leaf.is_weighted)
            select.feature_names = list(leaf.keys)
            bags = select(value)
            values, lengths, weights = bags.values, bags.lengths.view(len(leaf.keys), -1), bags.weights
        flat += [values, lengths.long(), *([weights.float()] if leaf.is_weighted else [])]
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
    """Load a program from a file whose checksums are right.

    Raises:
        ExportError: ``no_pt2``; ``damaged_file``: it holds more than ``export`` writes.
        RuntimeError: torch cannot read it.
    """
    read = check_reads_pt2()
    _refuse_pickles(file)
    file.file.seek(0)
    try:
        exported = read(file.file).exported_programs["model"]  # torch.export.load keeps its errors to itself
        return LoadedProgram(exported, signature)
    except (KeyError, ValueError, AssertionError) as error:  # the program is of another version of torch
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
    """A program of ``torch.export``, and its arguments before they are taken apart into tensors."""

    def __init__(self, exported: ExportedProgram, signature: Signature) -> None:
        super().__init__()
        self.exported = exported
        self.program = exported.module()
        self._signature = signature
        self._sizes = [
            signature.sizes.get(leaf.name, ()) if leaf.kind == "tensor" else ()
            for leaf in signature.leaves()
            for _ in leaf.parts
        ]
        self._inputs = [named_input(leaf) for leaf in signature.leaves()]
        placeholders = exported.graph.find_nodes(op="placeholder")
        user_inputs = exported.graph_signature.user_inputs
        self._examples = {node.name: node.meta["val"] for node in placeholders if node.name in user_inputs}

    def named(self, *leaves: Any) -> dict[str, torch.Tensor]:
        """The output tensors by name, for the tensors and KJTs of the model's arguments, in order.

        Raises:
            RuntimeError: the batch is malformed; the message ends with a reason code in brackets.
        """
        flat = flat_tensors(self._signature, list(leaves))
        for tensor, (name, example), sizes in zip(flat, self._examples.items(), self._sizes, strict=True):
            self._check(name, tensor, example, sizes)
        outputs: dict[str, torch.Tensor] = self.program(*flat)
        return outputs

    def serve(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The output tensors by name, for plain tensors by name.

        Raises:
            RuntimeError: as for ``named``.
        """
        return self.named(*(take(inputs) for take in self._inputs))

    @staticmethod
    def _check(name: str, tensor: torch.Tensor, example: torch.Tensor, of_sample: Sequence[int]) -> None:
        """Refuse a tensor of another rank or dtype, of another size where the program has a constant, or of size 0 in a
        dimension that is not the batch's: a trace takes it for a greater one.
        """
        sizes = zip(tensor.shape, example.shape, strict=False)
        of_both = zip(tensor.shape, of_sample, strict=False)
        is_empty = any(size == 0 and expected not in (-1, 0) for size, expected in of_both)
        unlike = {
            "wrong_rank": tensor.dim() != example.dim(),
            "wrong_dtype": tensor.dtype != example.dtype,
            "wrong_size": is_empty or any(size != expected for size, expected in sizes if isinstance(expected, int)),
        }
        reason = next((code for code, is_unlike in unlike.items() if is_unlike), "")
        if reason:
            expected = ", ".join(str(size) if isinstance(size, int) else "any" for size in example.shape)
            raise RuntimeError(
                f"{name} is {tensor.dtype} of sizes {list(tensor.shape)}, but the program takes {example.dtype} of "
                f"sizes [{expected}] [{reason}]"
            )


def names_of(leaf: Pattern) -> list[str]:
    """The names under which ``serve`` takes the tensors of an argument."""
    if leaf.kind == "tensor":
        return [leaf.name]
    names = [f"{leaf.name}.{key}" for key in leaf.keys] if leaf.kind == "kjt" else [leaf.name]
    return [f"{name}.{part}" for name in names for part in leaf.parts]


def named_input(leaf: Pattern) -> nn.Module:
    """Takes an argument out of the tensors that ``serve`` is given."""
    if leaf.kind == "tensor":
        return NamedTensor(leaf.name, **(leaf.value or {}))  # a loaded manifest may lack it
    if leaf.kind == "jagged":
        return NamedJagged(leaf.name, leaf.is_weighted)
    return NamedFeatures(leaf.name, leaf.keys, leaf.is_weighted)
