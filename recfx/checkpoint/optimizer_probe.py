"""The state that a torch optimizer keeps for a parameter, found out by one step on a parameter with one element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recfx.checkpoint.contents import mismatch
from recfx.errors import with_article

ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
    torch.optim.SparseAdam,
)  # fmt: skip
"""Optimizers whose state consists of numbers, and of tensors of the parameter's shape."""


def state_after_a_step(optimizer: type, settings: Mapping[str, Any], parameter: Tensor, name: str) -> dict[str, Any]:
    """The state that a parameter has after its first step.

    Args:
        optimizer: one of ``ELEMENTWISE``.
        settings: the settings of its group; those that the optimizer does not know are ignored.
        parameter: the parameter, whose device, dtype and number of dimensions matter.
        name: its name, for the message.

    Raises:
        CheckpointError: ``checkpoint_mismatch``: the optimizer cannot take a step with these settings.
    """
    known = {"differentiable": False}  # otherwise torch refuses leaves, such as this one
    try:
        with torch.inference_mode(False):
            tiny = nn.Parameter(torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device))
            tiny.grad = torch.zeros_like(tiny)
            if optimizer is torch.optim.SparseAdam:
                tiny.grad = tiny.grad.to_sparse()
            probe: torch.optim.Optimizer = optimizer([tiny])
            group = probe.param_groups[0]
            given = {key: value for key, value in settings.items() if key in group and key != "params"}
            group.update({key: value.clone() if isinstance(value, Tensor) else value for key, value in given.items()})
            group.update({key: value for key, value in known.items() if key in group})
            probe.step()
    except Exception as error:  # bad settings can make torch's code raise anything
        raise mismatch(
            f"{with_article(optimizer.__name__)} cannot step with the settings that were saved "
            f"({type(error).__name__}: {error}).",
            module_path=name,
            what_to_do="build the optimizer as it was built when saving.",
        ) from error
    return dict(probe.state[tiny])
