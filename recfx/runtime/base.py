"""What the modules of all nodes have in common: a name, which profiles show as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recfx.lowering._profiler_ranges import forward_range, is_profiling
from recfx.runtime.fx_leaf import FxLeaf


@torch.compiler.disable(
    reason="recfx: a converted collection is one graph break; compile the model without fullgraph=True"
)
def opaque(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` outside the graph that torch.compile is building.

    Nodes pass memory addresses and Python state to kernels; compilation cannot improve these, but would guard on both.
    """
    return function(*args, **kwargs)


class NodeModule(FxLeaf):
    """A module that a graph node calls.

    Attributes:
        label: the node's name, under which profiles show its range.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label = type(self).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return opaque(super().__call__, *args, **kwargs)
        if not is_profiling():
            return super().__call__(*args, **kwargs)
        with forward_range(self.label):
            return super().__call__(*args, **kwargs)
