"""The result of one step of a model, with everything worth comparing."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

COMPARED = ("outputs", "gradients", "parameters", "buffers")
"""The parts of two runs that are compared, in this order."""


@dataclass
class Run:
    """The result of one step.

    Args:
        outputs: the model's output tensors, by position.
        gradients: gradients of parameters and of inputs that require them.
        parameters: parameters after the step.
        buffers: buffers after the step; those of the indexes are not compared.
        pooled: output of every collection, by path and key.
        touched: rows that the batch used, by parameter name; only for standard collections.
        calls: how often the forward called each collection, by path.
        originals: paths of the collections whose original the forward called instead of the copy; if there are any,
            nothing else was run.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    pooled: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    touched: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    originals: set[str] = field(default_factory=set)
