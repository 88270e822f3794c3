"""Whether an optimizer can take the settings and the state that were saved, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from recfx.checkpoint.contents import mismatch
from recfx.errors import CheckpointError, with_article

NOT_SETTINGS = ("params", "param_names")
"""Entries of an optimizer's groups that say which parameters it updates: a checkpoint has its own names for them."""
ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
    torch.optim.SparseAdam,
)  # fmt: skip
"""Optimizers whose state consists of numbers, and of tensors of the parameter's shape."""


def _mismatch(message: str, module_path: str) -> CheckpointError:
    build = "build the optimizer as it was built when saving."
    return mismatch(message, module_path=module_path, what_to_do=build)


def check_settings_fit(saved: Mapping[str, Any], current: Mapping[str, Any], module_path: str) -> None:
    """Check that an optimizer can take the settings: those that it has must be of the same kind.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    for key, value in saved.items():
        if key not in NOT_SETTINGS and key in current and not _alike(value, current[key]):
            here = _shown(current[key])
            raise _mismatch(f"its setting {key!r} was saved as {_shown(value)}, but is {here} here.", module_path)


def check_state_fits(
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    parameter: Tensor,
    optimizer: type,
    settings: Mapping[str, Any],
    name: str,
) -> None:
    """Check that the next step can continue from the saved state of one parameter, for known torch optimizers.

    Args:
        tensors: the tensors of the state, possibly on meta.
        values: the rest of the state.
        parameter: the parameter that the state belongs to.
        optimizer: class of the optimizer.
        settings: the settings of its group, as they will be.
        name: name of the parameter, for the message.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    if optimizer not in ELEMENTWISE or not (tensors or values):
        return
    for key, needed in state_after_a_step(optimizer, settings, parameter, name).items():
        saved = tensors.get(key, values.get(key))
        if saved is None and (needed is None or optimizer is torch.optim.SGD):
            continue  # SGD starts a momentum that is missing
        if saved is None:
            raise _mismatch(f"its saved state lacks {key!r}.", name)
        if isinstance(needed, Tensor) and needed.dim() == parameter.dim() > 0:
            fits = isinstance(saved, Tensor) and saved.shape == parameter.shape
        else:
            fits = is_number(saved) or (isinstance(saved, Tensor) and saved.shape == parameter.shape == ())
        if not fits:
            raise _misshapen(repr(key), saved, parameter, name)
    for key, value in {**values, **tensors}.items():  # including those that the next step does not need
        alike = value is None or isinstance(value, bool) or is_number(value)
        if not alike and not (isinstance(value, Tensor) and tuple(value.shape) in ((), tuple(parameter.shape))):
            raise _misshapen(ascii(key), value, parameter, name)


def _misshapen(key: str, saved: object, parameter: Tensor, name: str) -> CheckpointError:
    shape = tuple(parameter.shape)
    return _mismatch(f"its state {key} was saved as {_shown(saved)}, but the parameter is {shape}.", name)


def state_after_a_step(optimizer: type, settings: Mapping[str, Any], parameter: Tensor, name: str) -> dict[str, Any]:
    """The state that a parameter has after its first step, found out by a step on a parameter with one element.

    Args:
        optimizer: one of ``ELEMENTWISE``.
        settings: the settings of its group; those that the optimizer does not know are ignored.
        parameter: the parameter, whose device, dtype and number of dimensions matter.
        name: its name, for the message.

    Raises:
        CheckpointError: ``checkpoint_mismatch``: the optimizer cannot take a step with these settings.
    """
    try:
        with torch.inference_mode(False):
            tiny = nn.Parameter(torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device))
            tiny.grad = torch.zeros_like(tiny)
            if optimizer is torch.optim.SparseAdam:
                tiny.grad = tiny.grad.to_sparse()
            probe: torch.optim.Optimizer = optimizer([tiny])
            group = probe.param_groups[0]
            for key, value in settings.items():
                if key in group and key != "params":
                    group[key] = value.clone() if isinstance(value, Tensor) else value
            if "differentiable" in group:
                group["differentiable"] = False  # otherwise torch refuses leaves, such as this one
            probe.step()
    except Exception as error:  # bad settings can make torch's code raise anything
        problem = f"{with_article(optimizer.__name__)} cannot step with the settings that were saved"
        raise _mismatch(f"{problem} ({type(error).__name__}: {error}).", name) from error
    return dict(probe.state[tiny])


def is_number(value: object) -> bool:
    """Whether it is an int or a float, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.dtype.is_complex and value.dtype != torch.bool
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


def _alike(saved: object, current: object) -> bool:
    if isinstance(current, numpy.generic):
        current = current.item()
    if current is None:
        return saved is None or isinstance(saved, (bool, int, float, str, Tensor))
    if saved is None:
        return isinstance(current, bool)  # for example foreach= of torch's optimizers, which may be None
    if isinstance(saved, Tensor) and isinstance(current, Tensor):
        return saved.shape == current.shape
    if is_number(saved) and is_number(current):
        return True
    if isinstance(saved, (tuple, list)) and isinstance(current, (tuple, list)):
        return len(saved) == len(current) and all(map(_alike, saved, current))
    return type(saved) is type(current)


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!a:.50}"
