"""An ordinary ``torch.optim`` optimizer in a checkpoint: state by the names of its parameters, not by their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper

from recfx.checkpoint.names import mismatch
from recfx.errors import CheckpointError

_BUILD_AS_SAVED = "build the optimizer as it was built when saving, or load without optimizer=."


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The ``torch.optim`` optimizer inside TorchRec's ``KeyedOptimizerWrapper``.

    Raises:
        CheckpointError: ``optimizer_not_supported``.
    """
    inner = optimizer._optimizer if isinstance(optimizer, KeyedOptimizerWrapper) else optimizer
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, KeyedOptimizer):
        raise CheckpointError(
            f"optimizer= is a {type(inner).__name__}.",
            reason="optimizer_not_supported",
            what_to_do="pass a torch.optim.Optimizer; fused optimizers are saved with the model.",
        )
    return inner


def load_state(optimizer: Any, state: dict[str, Any]) -> None:
    """``load_state_dict`` of what ``rebuild_state`` has made: all or nothing."""
    inner = unwrap_optimizer(optimizer)
    inner.load_state_dict(state)
    if optimizer is not inner:  # torch has put new objects in place of those that the wrapper knows
        optimizer.state, optimizer.param_groups = inner.state, inner.param_groups


def describe_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What ``optimizer.state_dict()`` says: its tensors by ``<parameter>.<state>``, and everything else.

    Raises:
        CheckpointError: ``optimizer_not_supported``: it steps parameters that are not in ``model``.
    """
    names = _names(optimizer, model)
    foreign = [number for number, name in enumerate(names) if name == f"#{number}"]
    if foreign:
        raise CheckpointError(
            f"optimizer= steps {len(foreign)} parameters that the model has not; the first is its number {foreign[0]}.",
            reason="optimizer_not_supported",
            what_to_do="pass an optimizer of parameters of this model; save that of others with torch.save.",
        )
    saved = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for number, state in saved["state"].items():
        values[names[number]] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{names[number]}.{key}"] = value.detach()
                value = None
            values[names[number]][key] = value
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "state": values}


def rebuild_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], described: Mapping[str, Any]
) -> dict[str, Any]:
    """The ``state_dict`` for ``optimizer``, checked against its parameters. Changes nothing.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    names = _names(optimizer, model)
    if described["kind"] != type(optimizer).__name__:
        raise mismatch(
            f"the saved optimizer is a {described['kind']}, this one a {type(optimizer).__name__}.",
            module_path="optimizer",
            what_to_do=_BUILD_AS_SAVED,
        )
    saved_groups = [group["params"] for group in described["groups"]]
    ordered = iter(names)
    groups = [[next(ordered) for _ in group["params"]] for group in optimizer.param_groups]
    if saved_groups != groups:
        raise mismatch(
            f"the saved optimizer steps {saved_groups}, this one {groups}.",
            module_path="optimizer",
            what_to_do=_BUILD_AS_SAVED,
        )
    state: dict[int, dict[str, Any]] = {}
    for number, name in enumerate(names):
        for key, value in described["state"].get(name, {}).items():
            state.setdefault(number, {})[key] = tensors.get(f"{name}.{key}", value)
    numbered = iter(range(len(names)))
    rebuilt = [{**group, "params": [next(numbered) for _ in group["params"]]} for group in described["groups"]]
    return {"state": state, "param_groups": rebuilt}


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """A name for every parameter of the optimizer, in its order."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [known.get(id(parameter), f"#{number}") for number, parameter in enumerate(parameters)]
