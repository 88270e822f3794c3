"""One kernel, its reference, the shapes on which they have to agree, and what came of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from recfx.kernels.build import library

# A GPU fuses multiplications and additions, and its division and square root may be a bit off.
ON_A_DEVICE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ON_THE_CPU = ON_A_DEVICE | {torch.float32: 1e-5}


@dataclass(frozen=True)
class Shape:
    """What a kernel is called with: a few words, and the arguments, on the CPU."""

    text: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """Whether a kernel was right.

    Args:
        name: of the operator.
        where: ``device`` or ``host``.
        checked: how many shapes it was run with.
        wrong: how many of them it was wrong with.
        smallest: the first of those, which is the smallest.
        message: what was wrong with that one, or what ``torch.library.opcheck`` said; ``""`` if all is well.
        traceback: of what was raised, if anything was.
        seconds: all of it, compilation of kernels included.
    """

    name: str
    where: str
    checked: int
    wrong: int = 0
    smallest: str = ""
    message: str = ""
    traceback: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class KernelCheck:
    """One kernel.

    Args:
        name: of the operator of namespace ``recfx``, perhaps with more after a colon.
        shapes: the smallest first; the argument says whether few are enough.
        kernel: calls the operator, on tensors that it may change, and gives back what it made of them.
        reference: likewise, by the reference.
        in_one_order: whether both add up in one order.
    """

    name: str
    shapes: Callable[[bool], Iterator[Shape]]
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    in_one_order: bool = True

    def mismatch(self, shape: Shape, device: torch.device) -> str:
        """What differs on a shape, in one line; ``""`` if nothing does."""
        actual = self.kernel(*moved(shape.arguments, device))
        expected = self.reference(*moved(shape.arguments, torch.device("cpu")))
        return mismatch(actual, expected, tolerances(device, self.in_one_order))

    def opcheck(self, shape: Shape, device: torch.device, quick: bool) -> None:
        """Raise whatever ``torch.library.opcheck`` does; ``quick``: no compilation."""
        utilities = ("test_schema", "test_faketensor", *(() if quick else ("test_aot_dispatch_dynamic",)))
        operator = getattr(library.operators(), self.name.partition(":")[0]).default
        torch.library.opcheck(operator, moved(shape.arguments, device), test_utils=utilities)

    def run(self, device: torch.device, where: str, quick: bool) -> Answer:
        """Run the kernel on all its shapes, and ``opcheck`` on the smallest."""
        begin, shapes = time.perf_counter(), list(self.shapes(quick))
        failures = [(shape.text, *attempt(partial(self.mismatch, shape, device))) for shape in shapes]
        wrong = [failure for failure in failures if failure[1]]
        if wrong:
            smallest, message, trace = wrong[0]
        else:
            smallest, (message, trace) = "", attempt(lambda: self.opcheck(shapes[0], device, quick))
            message = message and f"opcheck: {message}"
        seconds = time.perf_counter() - begin
        return Answer(self.name, where, len(shapes), len(wrong), smallest, message, trace, seconds)


def attempt(check: Callable[[], str | None]) -> tuple[str, str]:
    """What is wrong, in one line, and the traceback of what was raised.

    A compiler of kernels that is new to a device fails in any way. To find that is what the check is for, so every
    ``Exception`` is a result. Ctrl-C is none.
    """
    try:
        return check() or "", ""
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {text}"[:500], "".join(traceback.format_exception(error))


def tolerances(device: torch.device, in_one_order: bool = False) -> Mapping[torch.dtype, float]:
    """Absolute and relative, by dtype; 0 for all that are not listed.

    Args:
        device: on which the kernel ran.
        in_one_order: kernel and reference add up in one order: on the CPU, numbers are then equal bit for bit.
    """
    return ON_A_DEVICE if device.type != "cpu" else {} if in_one_order else ON_THE_CPU


def mismatch(actual: Any, expected: Any, allowed: Mapping[torch.dtype, float]) -> str:
    """What differs, in one line; ``""`` if nothing does. Integers, shapes and dtypes have to be equal.

    Args:
        actual: a tensor, None, or a sequence of these, on any device.
        expected: likewise, on the CPU.
        allowed: see ``tolerances``.
    """
    if isinstance(actual, Sequence) and isinstance(expected, Sequence):
        if len(actual) != len(expected):
            return f"{len(actual)} results instead of {len(expected)}"
        mismatches = (mismatch(one, other, allowed) for one, other in zip(actual, expected, strict=True))
        return next((f"result {place}: {text}" for place, text in enumerate(mismatches) if text), "")
    if actual is None and expected is None:
        return ""
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        return f"{type(actual).__name__} instead of {type(expected).__name__}"
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"{actual.dtype} {list(actual.shape)} instead of {expected.dtype} {list(expected.shape)}"
    tolerance = allowed.get(expected.dtype, 0.0)
    try:
        torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def moved(values: Any, device: torch.device) -> Any:
    """A copy of ``values``, with every tensor on the device in memory of its own."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), values)
