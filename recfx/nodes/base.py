"""What the modules of all nodes have in common: one name, also in a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from recfx.nodes.fx_leaf import FxLeaf


@torch.compiler.disable(
    reason="recfx: a converted collection is one graph break; compile the model without fullgraph=True"
)
def opaque(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` outside the graph that torch.compile is making.

    Nodes hand addresses and Python state to kernels that compilation cannot improve, and would guard on both.
    """
    return function(*args, **kwargs)


class NodeModule(FxLeaf):
    """A module that a graph node calls.

    Attributes:
        label: the node's name; the range that a profile shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label = type(self).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return opaque(super().__call__, *args, **kwargs)
        if not profiler._is_profiler_enabled:
            return super().__call__(*args, **kwargs)
        with torch.profiler.record_function(self.label):
            return super().__call__(*args, **kwargs)
