"""A kernel as it is compiled, and the calls that it must answer as its reference does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Place = Callable[[torch.Tensor], torch.Tensor]
"""Gives back a copy of a tensor that a kernel may read and write, possibly with guard pages around it."""


@dataclass(frozen=True)
class Call:
    """One launch.

    Args:
        arguments: contiguous tensors and numbers, in the kernel's order, without the constexpr ones.
        expected: by parameter, what the tensors hold after the launch.
        rtol: of floating-point results. 0: bit for bit, which the order of sums takes part in.
        atol: likewise.
        keep: tensors that the kernel reaches through others: they live as long as the call.
        also: tensors that the kernel reaches through others, and what they hold after the launch.
    """

    arguments: Sequence[Any]
    expected: Mapping[str, torch.Tensor]
    rtol: float = 0.0
    atol: float = 0.0
    keep: tuple[torch.Tensor, ...] = ()
    also: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


@dataclass(frozen=True)
class KernelCase:
    """One compiled form of a kernel.

    Args:
        name: unique among all cases.
        kernel: ``module:function``.
        signature: the type of each parameter that is not a constexpr, in order: ``*fp32``, ``*i64``, ``i32``.
        constexprs: the values of the others; functions as ``module:function``.
        calls: by label; each makes its arguments in the memory that it is given.
        programs: the size of the grid.
        fewer_rows: whether it asks for fewer rows at once than fit, and so takes less than its bounds say.
        on_gpu: whether it is a form for GPUs alone.
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    calls: Mapping[str, Callable[[Place], Call]]
    programs: int = 40
    fewer_rows: bool = False
    on_gpu: bool = False

    def __str__(self) -> str:
        return self.name


def assert_answered(case: KernelCase, call: Call, least: Mapping[torch.dtype, float] | None = None) -> None:
    """Compare what the launch left in the tensors with what the reference says.

    Args:
        case: what was launched.
        call: with what; its tensors may be on a device.
        least: the tolerance, absolute and relative, that a dtype has at least; there, integers are compared exactly.
    """
    arguments = dict(zip(case.signature, call.arguments, strict=True))
    pairs = [(parameter, arguments[parameter], expected) for parameter, expected in call.expected.items()]
    pairs += [(f"tensor {number}", actual, expected) for number, (actual, expected) in enumerate(call.also)]
    for what, actual, expected in pairs:
        tolerance = 0.0 if least is None else least.get(expected.dtype, 0.0)
        exact = least is not None and not expected.is_floating_point()
        rtol, atol = (0.0, 0.0) if exact else (max(call.rtol, tolerance), max(call.atol, tolerance))
        torch.testing.assert_close(
            actual.cpu(), expected, rtol=rtol, atol=atol, equal_nan=True,
            msg=lambda text, what=what: f"{case.name}, {what}: {text}",
        )  # fmt: skip


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Where each bag begins, and the end of the last one."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def from_first(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Elements from the first tensor to each: tables lie apart from each other."""
    first = tensors[0].data_ptr()
    return torch.tensor([(tensor.data_ptr() - first) // tensor.element_size() for tensor in tensors])


def resolved(constexprs: Mapping[str, Any]) -> dict[str, Any]:
    """With the functions that they name as ``module:function``."""
    return {name: function_at(value) if isinstance(value, str) else value for name, value in constexprs.items()}


def function_at(place: str) -> Any:
    """``module:function``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
