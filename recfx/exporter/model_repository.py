"""A file in the layout of Triton Inference Server's model repositories, for its backend ``pytorch``.

The backend calls ``forward`` with tensors, and takes a tensor or a tuple of tensors; ``config.pbtxt`` says their names,
dtypes and sizes. It takes a dictionary of tensors with any names, or tensors by position, whose names end with their
number (model_configuration.md of triton-inference-server/server, "Special Conventions for PyTorch Backend").
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from recfx.errors import ExportError
from recfx.exporter.arguments import Signature
from recfx.exporter.compare_outputs import BIGGER, ModelCall
from recfx.exporter.loaded_program import names_of
from recfx.exporter.model_file import destination, disk_errors
from recfx.kernels.build.private_files import new_file

_TYPES = {
    "bool": "TYPE_BOOL", "uint8": "TYPE_UINT8", "int8": "TYPE_INT8", "int16": "TYPE_INT16", "int32": "TYPE_INT32",
    "int64": "TYPE_INT64", "float16": "TYPE_FP16", "float32": "TYPE_FP32", "float64": "TYPE_FP64",
    "bfloat16": "TYPE_BF16",
}  # fmt: skip
"""Triton's names of dtypes."""

Described = Iterator[tuple[str, str, list[int]]]
"""Tensors: the name, the dtype, and the sizes of each, -1 where they change."""


def inputs_of(signature: Signature) -> Described:
    """The tensors that a file takes by name; ids and lengths as int64."""
    for leaf in signature.leaves():
        if leaf.kind == "tensor":
            dimensions = 1 if leaf.value is None else leaf.value["dimensions"]
            yield leaf.name, leaf.type_name, list(signature.sizes.get(leaf.name, [-1] * dimensions))
            continue
        for name in names_of(leaf):
            yield name, "float32" if name.endswith(".weights") else "int64", [-1]


def outputs_of(call: ModelCall, named: Callable[..., dict[str, torch.Tensor]]) -> Described:
    """The tensors that a file returns, in order. What changes with the batch is told from a bigger one."""
    of_sample, of_bigger = (
        named(*call.leaves(sample)) for sample in (call.sample, call.other_calls.get(BIGGER, call.sample))
    )
    for name, value in of_sample.items():
        sizes = zip(value.shape, of_bigger[name].shape, strict=True)
        constant = [size if size == other and place else -1 for place, (size, other) in enumerate(sizes)]
        yield name, str(value.dtype).removeprefix("torch."), constant


def configuration(name: str, call: ModelCall, named: Callable[..., dict[str, torch.Tensor]]) -> str:
    """The text of ``config.pbtxt``; ``named`` is what the program computes of the leaves of a call."""
    parts = [f"name: {json.dumps(name)}", 'backend: "pytorch"', "max_batch_size: 0"]
    for kind, tensors in (("input", inputs_of(call.signature)), ("output", outputs_of(call, named))):
        for number, (tensor, dtype, sizes) in enumerate(tensors):
            by_number = call.forward == "positional" or kind == "output"
            shown = f"{kind.upper()}__{number}" if by_number else tensor
            if dtype not in _TYPES:
                raise ExportError(
                    f"{kind} {tensor!r} is {dtype}, which Triton Inference Server has no name for.",
                    reason="unsupported_argument",
                    what_to_do=f"let the model take and return one of: {', '.join(_TYPES)}.",
                )
            fields = f"name: {json.dumps(shown)} data_type: {_TYPES[dtype]} dims: [ {', '.join(map(str, sizes))} ]"
            parts.append(f"{kind} [ {{ {fields} }} ]" + f"  # {tensor}" * by_number)
    return "\n".join(parts) + "\n"


def write_repository(repository: Path, file: Path, text: str) -> Path:
    """Put a file, as the next version of the model of its name, and its configuration into a repository."""
    model = repository / file.stem
    with disk_errors(model):
        versions = [int(entry.name) for entry in model.glob("[0-9]*") if entry.name.isdigit()]
        folder = model / str(max(versions, default=0) + 1)
        beside = folder.with_name(f".{folder.name}")  # the server, which may be looking, sees whole versions only
        beside.mkdir(parents=True, exist_ok=True)
        with new_file(model / "config.pbtxt") as written:
            written.path.write_text(text)
            written.put_in_place()
        with new_file(beside / "model.pt") as copied:
            shutil.copyfile(destination(file), copied.path)
            copied.put_in_place()
        beside.rename(folder)
    return folder
