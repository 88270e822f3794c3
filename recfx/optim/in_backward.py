"""Optimizers in backward: which of them have a fused form, and how to go back to the dense form."""

import inspect
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from recfx.errors import ConversionError, Diagnostic, Severity
from recfx.optim.attached import (
    attached_classes,
    attached_optimizers,
    keep_form,
    kept_form,
    run_in_backward,
    set_attached,
)
from recfx.optim.fused_optimizer import AttachedOptimizer, FusedOptimizer, has_own_hook
from recfx.optim.fused_params import optimizer_from_params
from recfx.optim.rules import RULES, rule_of_class
from recfx.optim.rules.rule import NEUTRAL, Rule


def hooks_on_step(weight: torch.Tensor) -> str:
    """Describes a user's hook on the gradient of ``weight`` or on its optimizer's step; ``""`` if there is none.

    The hooks of ``apply_optimizer_in_backward`` do not count: they are on the weight's ``AccumulateGrad`` node.
    """
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "a gradient hook is registered on its weight"
    for optimizer in attached_optimizers(weight):
        attributes = optimizer.__dict__
        # Learning-rate schedulers replace step() by one that only records that it was called.
        has_own_step = "step" in attributes and not hasattr(attributes["step"], "_wrapped_by_lr_sched")
        before, after = (attributes.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
        if has_own_step or after or (before and len(before) > has_own_hook(optimizer)):
            return "its optimizer has a step hook, or a step() that replaces the one of its class"
    return ""


def positions_with_hooks(weights: Sequence[torch.Tensor], attached: Sequence[Any]) -> list[int]:
    """Which of ``weights`` have ``hooks_on_step``. Every forward calls this, in some models for thousands of tables.
    ``attached`` are the optimizers of all of them.
    """
    optimizers = [optimizer.__dict__ for optimizer in attached]
    if not any(map(_BACKWARD_HOOKS, weights)) and not any(map(_ACCUMULATED_HOOKS, weights)):
        before, after = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
        if not [own for own in optimizers if "step" in own or own.get(before) or own.get(after)]:
            return []
    return [position for position, weight in enumerate(weights) if hooks_on_step(weight)]


_BACKWARD_HOOKS, _ACCUMULATED_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


def fused_optimizer_of(weight: nn.Parameter, path: str) -> FusedOptimizer | Diagnostic | None:
    """The fused form of the optimizer in backward of the table at ``path``; None if there is no optimizer, and a
    diagnostic that says why if it has no fused form. Its code is ``unsupported_optimizer_argument`` if the optimizer is
    known but an argument is not: ignoring the argument would train a different model.
    """
    optimizers = attached_optimizers(weight)
    if not optimizers:
        return None
    if len(optimizers) > 1:
        return _not_fused(
            "several_optimizers", path, f"{len(optimizers)} optimizers run in its backward.", "attach only one."
        )
    (optimizer,) = optimizers
    rule = rule_of_class(type(optimizer))
    if rule is None:
        names = sorted({fused_class.__name__ for fused_rule in RULES for fused_class in fused_rule.classes})
        return _not_fused(
            "optimizer_not_fused",
            path,
            f"{type(optimizer).__name__} has no fused form; it runs on the whole table after the backward, as before.",
            f"use one of {names} to have it fused.",
        )
    if not hasattr(optimizer, "param_groups"):
        return _of_placeholder(rule, optimizer, weight, path)
    if (several := sum(len(group["params"]) for group in optimizer.param_groups)) > 1:
        return _not_fused(
            "optimizer_not_fused",
            path,
            f"its {type(optimizer).__name__} has {several} parameters and steps all of them, so it runs on "
            "whole tables after the backward, as before.",
            "give each table an optimizer of its own, as apply_optimizer_in_backward does, to have it fused.",
        )
    group = optimizer.param_groups[0]
    arguments = inspect.signature(type(optimizer)).parameters  # schedulers write more entries into the group
    neutral = {**NEUTRAL, **rule.neutral}
    for name, value in group.items():
        if name in rule.supported or (name not in neutral and name not in arguments):
            continue
        if name != "params" and (isinstance(value, torch.Tensor) or value not in neutral.get(name, ())):
            return _not_fused(
                "unsupported_optimizer_argument",
                path,
                f"{type(optimizer).__name__}({name}={value!r}) has no fused form.",
                f"leave {name} at its default, or step this table with an ordinary optimizer instead.",
            )
    mode = next((settings[_MODE] for _, settings in attached_classes(weight) if settings.get(_MODE) is not None), None)
    if mode is not None and mode not in rule.decay_modes:
        return _not_fused(
            "unsupported_optimizer_argument",
            path,
            f"{type(optimizer).__name__} was given {_MODE}={mode!r}, which it does not follow itself, and TorchRec's "
            "sharded tables do: the same argument would train two different models.",
            f"leave it out here; for sharded tables, give weight_decay and {_MODE} to the sharders, in fused_params.",
        )
    return AttachedOptimizer(rule, optimizer, weight, _chosen(optimizer, weight))


_MODE = "weight_decay_mode"


def _of_placeholder(rule: Rule, optimizer: Any, weight: nn.Parameter, path: str) -> FusedOptimizer | Diagnostic:
    """The fused form of one of ``torchrec.optim``'s classes, which only hold arguments for FBGEMM.

    It is always the same object: nothing else has the state, and collections that share a table train it together.
    """
    kept: FusedOptimizer | None = kept_form(weight, optimizer)
    if kept is not None:
        return kept
    params, chosen = dict(optimizer._kwargs), set()
    for setting in rule.read_from_params:
        if setting.name in params:  # torch.optim's name; TorchRec renames it
            value = params.pop(setting.name)
            params |= zip(setting.fused_params, value if len(setting.fused_params) > 1 else [value], strict=True)
        if params.keys() & {*setting.fused_params}:
            chosen.add(setting.name)
    try:
        made = optimizer_from_params(rule, params)
        fused = FusedOptimizer(made.rule, made.group, chosen=frozenset(chosen), left_out=made.left_out)
        keep_form(weight, optimizer, fused)
        return fused
    except ConversionError as error:
        name = type(optimizer).__name__
        return _not_fused("unsupported_optimizer_argument", path, f"{name}: {error.message}", error.what_to_do)


def _not_fused(code: str, path: str, message: str, what_to_do: str) -> Diagnostic:
    return Diagnostic(code, path, message, what_to_do, Severity.WARNING)


def _chosen(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> frozenset[str]:
    """The settings that the user chose: those passed with the class, and those that differ from its defaults."""
    passed = {name for _, settings in attached_classes(weight) for name in settings}
    if "learning_rate" in passed:  # TorchRec renames it there when it shards the table
        passed.add("lr")
    group = optimizer.param_groups[0]
    return frozenset(passed | {name for name, value in optimizer.defaults.items() if group.get(name) != value})


def attach_unfused(weight: nn.Parameter, fused: FusedOptimizer) -> None:
    """Attach the dense form of a fused optimizer to ``weight``, with its settings and state, unless one is attached.

    Copies of a parameter lose their optimizer in backward, without which a plain model would silently stop training.
    """
    attached = attached_optimizers(weight)
    of_placeholder = bool(attached) and kept_form(weight, attached[0]) is fused
    if attached and not of_placeholder and not fused.is_form_of(attached[0]):  # a different one, attached later
        return
    settings = {key: fused.group[key] for key in fused.rule.supported if key in fused.group}
    if of_placeholder:  # its step() only raises; what torch hung on the weight calls the one in its place
        dense: Any = fused.rule.dense_class
        set_attached(weight, [dense([weight], **settings), *attached[1:]])
    elif not attached:
        run_in_backward(fused.rule.dense_class, weight, settings)
    attached_optimizers(weight)[0].state[weight].update(fused.dense_state(weight))


def fused_optimizers(
    bags: nn.ModuleDict, collection: str, tables: str
) -> tuple[dict[str, FusedOptimizer], dict[str, Diagnostic]]:
    """The optimizers in backward of these tables: those that have a fused form, and diagnostics for the others.
    ``bags``, the attribute ``tables`` of ``collection``, holds the rows of each table.
    """
    optimizers, not_fused = {}, {}
    for name, bag in bags.items():
        weight: Any = bag.weight
        path = f"{collection}.{tables}.{name}" if collection else f"{tables}.{name}"
        form = fused_optimizer_of(weight, path)
        if isinstance(form, FusedOptimizer) and (hooks := hooks_on_step(weight)):
            not_fused[name] = _not_fused(
                "optimizer_not_fused",
                path,
                f"{hooks}: a fused optimizer neither computes a gradient of the weight nor calls step(), so it runs on "
                "the whole table after the backward, as before.",
                "remove the hook to have it fused; a hook on the collection's output sees the pooled gradient.",
            )
        elif isinstance(form, FusedOptimizer):
            optimizers[name] = form
        elif form is not None:
            if form.code == "unsupported_optimizer_argument":
                raise ConversionError(
                    f"table {name!r}: {form.message}",
                    reason=form.code,
                    module_path=collection,
                    what_to_do=form.what_to_do,
                )
            not_fused[name] = form
    return optimizers, not_fused
