"""What one step of a model gave, with everything worth comparing."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

COMPARED = ("outputs", "gradients", "parameters", "buffers")
"""What is compared of two runs, in this order."""


@dataclass
class Run:
    """What one step gave.

    Args:
        outputs: the model's output tensors, by position.
        gradients: of parameters and of inputs that require them.
        parameters: after the step.
        buffers: after the step; those of the indexes are not compared.
        pooled: output of every collection, by path and key.
        touched: rows that the batch used, by parameter name; of standard collections only.
        calls: how often the forward called each collection, by path.
        originals: paths of the collections of which it called the original, not the copy: then nothing else ran.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    pooled: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    touched: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    originals: set[str] = field(default_factory=set)
