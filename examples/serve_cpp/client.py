"""Requests of ``recfx_serve`` and its answers, from Python; ``requests.h`` describes the format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Answer:
    """What the server said to one request.

    Args:
        id: the request's.
        version: of the file that gave the answer; ``"-"`` if the request could not be read.
        outputs: by name.
        error: the message, with a reason code in brackets at its end; empty if there is an answer.
    """

    id: str
    version: str
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    error: str = ""


def request_text(id: str, inputs: Mapping[str, torch.Tensor]) -> str:
    """One request.

    Args:
        id: which the answer repeats.
        inputs: tensors by name, as ``LoadedModel.serve`` takes them.
    """
    lines = [f"request\t{id}"]
    for name, tensor in inputs.items():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape))
        numbers = tensor.int() if tensor.dtype == torch.bool else tensor
        lines.append(f"{name}\t{dtype}\t{shape}\t{' '.join(map(repr, numbers.flatten().tolist()))}")
    return "\n".join([*lines, "end", ""])


def parse_answers(lines: Iterable[str]) -> Iterator[Answer]:
    """The answers in what the server prints, as soon as they are there.

    Raises:
        EOFError: the server has ended within an answer.
    """
    lines = iter(lines)
    for line in lines:
        if not line.endswith("\n"):
            raise EOFError(f"the server has ended within the line {line[:80]!r}")
        kind, id, version, *message = line.rstrip("\n").split("\t")
        if kind == "error":
            yield Answer(id, version, error=message[0])
            continue
        outputs = {}
        while (line := next(lines, "")) != "end\n":
            if not line.endswith("\n"):
                raise EOFError(f"the server has ended within its answer to request {id}")
            name, dtype, shape, numbers = line.rstrip("\n").split("\t")
            parse = float if dtype.startswith("float") else int
            values = torch.tensor([parse(number) for number in numbers.split()], dtype=getattr(torch, dtype))
            outputs[name] = values.view([int(size) for size in shape.split(",") if size])
        yield Answer(id, version, outputs)
