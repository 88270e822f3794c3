"""Optimizers in backward that have a fused form, with settings that make every step easy to see."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-2}),
    "rowwise_adagrad": (RowWiseAdagrad, {"eps": 1e-2}),
    "adam": (torch.optim.Adam, {"eps": 1e-2, "betas": (0.9, 0.99)}),
}


def attach(
    model: nn.Module | Iterable[nn.Parameter],
    kind: str | type[torch.optim.Optimizer],
    *,
    lr: float | None = 0.1,
    **settings: Any,
) -> None:
    """Attach an optimizer in backward to parameters.

    Args:
        model: a model, or some parameters.
        kind: a name in ``OPTIMIZERS``, whose settings are the defaults then, or a class.
        lr: the learning rate; None leaves it to the class.
        settings: of the optimizer.
    """
    optimizer, defaults = OPTIMIZERS[kind] if isinstance(kind, str) else (kind, {})
    rate = {} if lr is None else {"lr": lr}
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    _apply_optimizer_in_backward(optimizer, parameters, {**rate, **defaults, **settings})
