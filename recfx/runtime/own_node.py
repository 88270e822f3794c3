"""The module of an operator that the user has declared: it calls the module that the user's function has made."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from recfx.errors import ConversionError, type_of
from recfx.runtime.base import NodeModule


class OwnNode(NodeModule):
    """Runs the user's module as a node.

    Args:
        module: the user's. Graphs are made again at any time, so it must hold no parameters or buffers.
        collection: fully qualified name of the collection, for messages.
        kind: of the node.

    Raises:
        ConversionError: ``operator_with_state``, ``not_lowered``.
    """

    def __init__(self, module: nn.Module, collection: str, kind: str) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ConversionError(
                f"the function that makes what runs for {kind!r} returned {type_of(module)}.",
                reason="not_lowered",
                module_path=collection,
                what_to_do="return an nn.Module from make=, whose forward takes the inputs of the node.",
            )
        state = next(itertools.chain(module.named_parameters(), module.named_buffers()), None)
        if state is not None:
            raise ConversionError(
                f"the module of {kind!r} has a parameter or buffer {state[0]!r}, but graphs are no state: they are "
                "made again when an optimizer is attached, and checkpoints do not have them.",
                reason="operator_with_state",
                module_path=collection,
                what_to_do="keep what is learned in the model itself, and let the operator do without.",
            )
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        """See the user's module."""
        return self.module(*inputs)
