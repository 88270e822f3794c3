"""Operators whose kernels address memory themselves get plain tensors, whatever they were called with."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def triton_operator(
    name: str, mutates_args: Sequence[str] = (), rows_apart: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """``torch.library.custom_op`` with ``with_plain_arguments``."""

    def decorate(function: Callable[..., Any]) -> Any:
        plain = with_plain_arguments(function, mutates_args, rows_apart)
        return torch.library.custom_op(name, mutates_args=mutates_args)(plain)

    return decorate


def with_plain_arguments(
    function: Callable[..., Any], mutates_args: Sequence[str] = (), rows_apart: Sequence[str] = ()
) -> Callable[..., Any]:
    """``function`` with contiguous copies of tensors, and of those in lists, that are not contiguous.

    Args:
        function: an operator in Python.
        mutates_args: the parameters to which it writes; what it wrote into a copy is copied back. Expanded tensors,
            which cannot be written to, stay as they are.
        rows_apart: the parameters whose rows need not lie one after the other, if their columns do.
    """
    signature = inspect.signature(function, eval_str=True)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        given, copies = signature.bind(*arguments, **named), []
        for parameter, value in given.arguments.items():
            tensors = value if isinstance(value, (list, tuple)) else [value]
            if not any(isinstance(tensor, Tensor) and not tensor.is_contiguous() for tensor in tensors):
                continue
            is_written, apart = parameter in mutates_args, parameter in rows_apart
            plain = [_plain(tensor, is_written, apart) for tensor in tensors]
            given.arguments[parameter] = plain if isinstance(value, (list, tuple)) else plain[0]
            if is_written:
                copies += [(old, new) for old, new in zip(tensors, plain, strict=True) if old is not new]
        result = function(*given.args, **given.kwargs)
        for old, new in copies:
            old.copy_(new)
        return result

    call.__signature__ = signature  # type: ignore[attr-defined]  # from which torch makes the operator's schema
    return call


def _plain(value: Any, is_written: bool, rows_apart: bool) -> Any:
    is_kept = not isinstance(value, Tensor) or (rows_apart and value.stride(-1) == 1)
    return value if is_kept or (is_written and 0 in value.stride()) else value.contiguous()
