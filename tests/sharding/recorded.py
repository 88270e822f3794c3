"""What really goes over the wire: every collective of a step, with the bytes that this rank passed to it."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist

_OPERATIONS = {
    "all_to_all_single": ("all_to_all", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "all_gather_into_tensor": ("all_gather", 1),
    "all_gather": ("all_gather", 1),
}

Sent = list[tuple[str, int]]


def recorded(step: Callable[[], object]) -> Sent:
    """Run ``step`` with every collective of torch.distributed noted: operation and bytes handed over."""
    sent: Sent = []

    def watch(name: str) -> Callable[..., Any]:
        operation, position = _OPERATIONS[name]
        original = getattr(dist, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            tensor = arguments[position] if len(arguments) > position else keywords["input"]
            sent.append((operation, tensor.numel() * tensor.element_size()))
            return original(*arguments, **keywords)

        return call

    with mock.patch.multiple(dist, **{name: watch(name) for name in _OPERATIONS}):
        step()
    return sent
