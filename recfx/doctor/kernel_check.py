"""One kernel, its reference, and the shapes on which they have to agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from recfx.doctor.compare import mismatch, moved, tolerances
from recfx.kernels.build import library


@dataclass(frozen=True)
class Shape:
    """What a kernel is called with.

    Args:
        text: what it is, in a few words.
        arguments: on the CPU.
    """

    text: str
    arguments: tuple[Any, ...]


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
