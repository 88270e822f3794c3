"""What recfx did not make: the work of linear layers; everything else counts as nothing."""

from __future__ import annotations

import sympy
from torch import nn

from recfx.ir.meta import BATCH
from recfx.planner.pricing.work import Phases, Work


def dense_phases(module: nn.Module, trains: bool) -> Phases:
    """The linear layers inside ``module``, each called once per sample.

    Args:
        module: any module.
        trains: whether there is a backward, which does twice as much.
    """
    parts = []
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and isinstance(layer.weight, nn.Parameter):
            size, element = layer.weight.numel(), layer.weight.element_size()
            parts.append(
                Work(
                    read_bytes=sympy.Integer(size * element) + BATCH * layer.in_features * element,
                    written_bytes=BATCH * layer.out_features * element,
                    flops=2 * BATCH * size + BATCH * layer.out_features,
                )
            )
    forward = Work.total(parts)
    return Phases(forward, forward + forward) if trains else Phases(forward)
