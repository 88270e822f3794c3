"""What the modules of all nodes have in common: one name, also in a profile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import profiler


class NodeModule(nn.Module):
    """A module that a graph node calls.

    Attributes:
        label: the node's name; the range that a profile shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label = type(self).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not profiler._is_profiler_enabled:
            return super().__call__(*args, **kwargs)
        with torch.profiler.record_function(self.label):
            return super().__call__(*args, **kwargs)
