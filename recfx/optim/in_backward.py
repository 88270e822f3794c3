"""Optimizers in backward: which of them have a fused form, and the way back to the dense one."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import optim as distributed_optim
from torchrec.optim import rowwise_adagrad
from torchrec.optim.optimizers import SGD as TorchRecSGD
from torchrec.optim.optimizers import Adagrad as TorchRecAdagrad
from torchrec.optim.optimizers import Adam as TorchRecAdam

from recfx.errors import ConversionError
from recfx.optim.fused_optimizer import AttachedOptimizer, FusedOptimizer

# Optimizer class -> kind. torchrec's SGD, Adagrad and Adam are placeholders that only fused kernels carry out.
KINDS: dict[type, str] = {
    torch.optim.SGD: "sgd",
    TorchRecSGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    TorchRecAdagrad: "adagrad",
    rowwise_adagrad.RowWiseAdagrad: "rowwise_adagrad",
    torch.optim.Adam: "adam",
    TorchRecAdam: "adam",
}

# Arguments that a fused update carries out, per kind. Any other argument must stand at the value below.
SUPPORTED: dict[str, frozenset[str]] = {
    "sgd": frozenset({"lr", "weight_decay"}),
    "adagrad": frozenset({"lr", "eps", "weight_decay", "initial_accumulator_value"}),
    "rowwise_adagrad": frozenset({"lr", "eps", "weight_decay", "initial_accumulator_value"}),
    "adam": frozenset({"lr", "betas", "eps", "weight_decay"}),
}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "momentum": (0, 0.0),
    "dampening": (0, 0.0),
    "nesterov": (False,),
    "maximize": (False,),
    "lr_decay": (0, 0.0),
    "amsgrad": (False,),
    "decoupled_weight_decay": (False,),
    # These choose among implementations of the same rule.
    "foreach": (None, True, False),
    "fused": (None, True, False),
    "capturable": (False, True),
    "differentiable": (False,),
}
_PLACEHOLDER_DEFAULTS = {"lr": 0.01, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.0}


def hooks_on_step(weight: torch.Tensor) -> str:
    """What of the user's waits for the gradient of ``weight``, or for its optimizer's step; ``""`` if nothing does.

    The hooks of ``apply_optimizer_in_backward`` are none of them: they hang on its ``AccumulateGrad`` node.
    """
    if any(hooks_of(weight) for hooks_of in _HOOKS):
        return "a gradient hook is registered on its weight"
    if _watches_steps(weight):
        return "its optimizer has a step hook, or a step() that was put in place of its class's"
    return ""


_HOOKS = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")


def _watches_steps(weight: torch.Tensor) -> bool:
    for optimizer in weight.__dict__.get("_in_backward_optimizers", ()):
        found = optimizer.__dict__
        if found.get("_optimizer_step_pre_hooks") or found.get("_optimizer_step_post_hooks"):
            return True
        # Learning-rate schedulers put a step there that only notes that it was called.
        if "step" in found and not hasattr(found["step"], "_wrapped_by_lr_sched"):
            return True
    return False


def positions_with_hooks(weights: Sequence[torch.Tensor]) -> list[int]:
    """Which of ``weights`` have ``hooks_on_step``. Every forward asks this, of thousands of tables in some models."""
    if not any(any(map(hooks_of, weights)) for hooks_of in _HOOKS) and not any(map(_watches_steps, weights)):
        return []
    return [position for position, weight in enumerate(weights) if hooks_on_step(weight)]


@dataclass(frozen=True)
class NotFused:
    """Why a table's optimizer does not run in the lookup's backward."""

    reason: str
    message: str
    what_to_do: str


def fused_optimizer_of(weight: nn.Parameter) -> FusedOptimizer | NotFused | None:
    """The fused form of the optimizer in backward that hangs on ``weight``.

    Returns:
        None without one; :class:`NotFused` where it has no fused form. ``reason`` is ``unsupported_optimizer_argument``
        where the optimizer is known but an argument is not: ignoring it would train another model.
    """
    optimizers = getattr(weight, "_in_backward_optimizers", None)
    if not optimizers:
        return None
    if len(optimizers) > 1:
        return NotFused("several_optimizers", f"{len(optimizers)} optimizers run in its backward.", "attach one.")
    (optimizer,) = optimizers
    kind = KINDS.get(type(optimizer))
    if kind is None:
        return NotFused(
            "optimizer_not_fused",
            f"{type(optimizer).__name__} has no fused form; it runs on the whole table after the backward, as before.",
            f"use one of {sorted({known.__name__ for known in KINDS})} to have it fused.",
        )
    if hasattr(optimizer, "param_groups"):
        group = optimizer.param_groups[0]
    else:  # torchrec.optim's placeholders hold nothing but their arguments; FBGEMM's defaults apply
        group = {**_PLACEHOLDER_DEFAULTS, **optimizer._kwargs}
    arguments = inspect.signature(type(optimizer)).parameters  # schedulers write other things into the group
    for name, value in group.items():
        if name in SUPPORTED[kind] or (name not in NEUTRAL and name not in arguments):
            continue
        if name != "params" and (isinstance(value, torch.Tensor) or value not in NEUTRAL.get(name, ())):
            return NotFused(
                "unsupported_optimizer_argument",
                f"{type(optimizer).__name__}({name}={value!r}) has no fused form.",
                f"leave {name} at its default, or step this table with an ordinary optimizer instead.",
            )
    given = _given(optimizer, group)
    return (
        AttachedOptimizer(kind, optimizer, weight, given)
        if hasattr(optimizer, "param_groups")
        else FusedOptimizer(kind, group, given=given)
    )


def _given(optimizer: Any, group: Mapping[str, Any]) -> frozenset[str]:
    """The settings that somebody chose: they were passed with the class, or are not its defaults (any more)."""
    if not hasattr(optimizer, "param_groups"):
        return frozenset(optimizer._kwargs)
    passed: set[str] = set()
    for weight in group["params"]:
        for settings in getattr(weight, "_optimizer_kwargs", ()):
            passed.update("lr" if name == "learning_rate" else name for name in settings)  # TorchRec renames it
    changed = {name for name, value in group.items() if name not in optimizer.defaults}
    changed |= {name for name, value in optimizer.defaults.items() if not _is(group.get(name), value)}
    return frozenset(passed | changed)


def _is(value: Any, default: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(default, torch.Tensor):
        return value is default
    return bool(value == default)


_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": rowwise_adagrad.RowWiseAdagrad,
    "adam": torch.optim.Adam,
}


def run_in_backward(optimizer_class: type, weight: nn.Parameter, settings: dict[str, Any]) -> None:
    """Hang an optimizer on ``weight`` that steps in its backward; torch's own function, which is not public yet.

    That finds the weight's ``AccumulateGrad`` node by a view, which has none while the weight is frozen, or without
    autograd.
    """
    trained = weight.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        weight.requires_grad_()
        try:
            distributed_optim._apply_optimizer_in_backward(optimizer_class, [weight], settings)  # type: ignore[attr-defined]
        finally:
            weight.requires_grad_(trained)


def attach_unfused(weight: nn.Parameter, fused: FusedOptimizer) -> None:
    """Hang the dense form of a fused optimizer on ``weight``, with its settings and state, unless it has one already.

    Copies of a parameter lose their optimizer in backward; without it a plain model would quietly stop training.
    """
    attached = getattr(weight, "_in_backward_optimizers", None)
    if attached:
        if not fused.is_form_of(attached[0]):  # another one, attached since
            return
        state = attached[0].state.get(weight) if hasattr(attached[0], "state") else None
        if state is not None and state is not fused.state:  # another dtype: the fused state is a copy
            state.update({name: _like(value, state.get(name)) for name, value in fused.state.items()})
        return
    settings = {key: fused.group[key] for key in SUPPORTED[fused.kind] if key in fused.group}
    run_in_backward(_CLASSES[fused.kind], weight, settings)
    (optimizer,) = weight._in_backward_optimizers  # type: ignore[attr-defined]
    if fused.state:
        optimizer.state[weight] = fused.state


def _like(value: Any, old: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor):
        return value.to(old.device, old.dtype)
    return value


def fused_optimizers(bags: nn.ModuleDict, collection: str) -> tuple[dict[str, FusedOptimizer], dict[str, NotFused]]:
    """The optimizers in backward of these tables: those with a fused form, and why the others have none.

    Args:
        bags: one ``nn.EmbeddingBag`` a table.
        collection: fully qualified name, for messages.

    Raises:
        ConversionError: ``unsupported_optimizer_argument``.
    """
    optimizers, not_fused = {}, {}
    for name, bag in bags.items():
        weight: Any = bag.weight
        found = fused_optimizer_of(weight)
        if isinstance(found, FusedOptimizer) and (hooks := hooks_on_step(weight)):
            not_fused[name] = NotFused(
                "optimizer_not_fused",
                f"{hooks}: a fused optimizer has neither a gradient of the weight nor a step() to call, so it runs on "
                "the whole table after the backward, as before.",
                "remove the hook to have it fused; a hook on the collection's output sees the pooled gradient.",
            )
        elif isinstance(found, FusedOptimizer):
            optimizers[name] = found
        elif isinstance(found, NotFused):
            if found.reason == "unsupported_optimizer_argument":
                raise ConversionError(
                    f"table {name!r}: {found.message}",
                    reason=found.reason,
                    module_path=collection,
                    what_to_do=found.what_to_do,
                )
            not_fused[name] = found
    return optimizers, not_fused
