"""``fused_params``, TorchRec's dict of arguments for FBGEMM, converted to a fused optimizer."""

import math
from collections.abc import Mapping
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from recfx.errors import ConversionError, Diagnostic, Severity
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules import RULES, known_settings, rule_of_type
from recfx.optim.rules.rule import ANY_MODE, BETAS, WEIGHT_DECAY, Rule, Setting

# Entries that change nothing at these values; nor does any entry at None.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # Only LARS-SGD has it, for which FBGEMM's default is 0.9; whoever gives that wants momentum.
    "momentum": (0, 0.0),
    "eta": (0.001,),
    "gradient_clipping": (False,),
    "max_gradient": (1.0,),  # not used without gradient_clipping
    "max_norm": (0.0,),
    "stochastic_rounding": (False,),
    "output_dtype": (SparseType.FP32,),
    "bounds_check_mode": (BoundsCheckMode.WARNING, BoundsCheckMode.FATAL),  # here, ids out of range are always an error
    "enforce_hbm": (False, True),  # tables are never stored anywhere else
    "cache_algorithm": (CacheAlgorithm.LRU,),
    "cache_load_factor": (0.2,),
    "cache_sets": (0,),
    "cache_reserved_memory": (0.0,),
    "cache_precision": (),
    "prefetch_pipeline": (False,),
}


def fused_optimizer_from_params(params: Mapping[str, Any]) -> FusedOptimizer:
    """The optimizer of one table; every call creates one with its own group.

    Without ``optimizer`` it is exact SGD, FBGEMM's default. ``weight_decay`` is applied where FBGEMM applies it: in
    row-wise Adagrad it is added to the gradient with ``WeightDecayMode.L2`` and taken off the weights with
    ``WeightDecayMode.DECOUPLE``, but left out with ``WeightDecayMode.NONE``, FBGEMM's default; SGD and Adagrad leave it
    out in every mode. LAMB, LARS-SGD and partial row-wise Adam have a weight decay of their own, in every mode.
    ``left_out`` tells what was not applied. Arguments that no rule reads are only allowed at values that change nothing
    (``unsupported_fused_param``).
    """
    optimizer = EmbOptimType.EXACT_SGD if params.get("optimizer") is None else params["optimizer"]
    rule = rule_of_type(optimizer)
    if rule is None:
        names = ", ".join(f"EmbOptimType.{fused_type.name}" for fused in RULES for fused_type in fused.fused_types)
        raise _unsupported("optimizer", optimizer, f"use one of {names}.")
    return optimizer_from_params(rule, params)


def optimizer_from_params(rule: Rule, params: Mapping[str, Any]) -> FusedOptimizer:
    """The optimizer of ``rule`` with the settings in ``params``, and TorchRec's defaults for those not given.

    ``eps``, betas and ``weight_decay`` have no effect if the rule does not read them, as in FBGEMM;
    ``weight_decay_mode`` may choose one of its variants, and ``optimizer`` is ignored.
    """
    arguments = {name: value for name, value in params.items() if value is not None and name != "optimizer"}
    mode = arguments.pop("weight_decay_mode", WeightDecayMode.NONE)
    if mode not in ANY_MODE:
        names = ", ".join(f"WeightDecayMode.{allowed.name}" for allowed in ANY_MODE)
        raise _unsupported("weight_decay_mode", mode, f"leave it out, or use one of {names}.")
    rule, left_out = rule.variants.get(mode, rule), 0.0
    values = {setting.name: _value(setting, arguments) for setting in rule.read_from_params}
    if mode not in rule.decay_modes and not rule.decay_in_fused_params:
        left_out, values[WEIGHT_DECAY.name] = values[WEIGHT_DECAY.name], 0.0
    if values[WEIGHT_DECAY.name] and rule.decay_in_fused_params:
        raise _unsupported("weight_decay", values[WEIGHT_DECAY.name], rule.decay_in_fused_params)
    for name, value in arguments.items():
        if name not in NEUTRAL:
            entries = dict.fromkeys(param for setting in known_settings() for param in setting.fused_params)
            raise _unsupported(name, value, f"leave it out; the known names are {', '.join(('optimizer', *entries))}.")
        if value not in NEUTRAL[name]:
            raise _unsupported(name, value, f"leave {name} out.")
    group = {setting.name: values[setting.name] for setting in rule.settings}
    return FusedOptimizer(rule, group, left_out=left_out)


def weight_decay_left_out(optimizer: FusedOptimizer, path: str) -> Diagnostic:
    """What to say about the optimizer of the table at ``path`` if ``optimizer.left_out`` is not 0."""
    modes = [f"WeightDecayMode.{mode.name}" for mode in (*optimizer.rule.decay_modes, *optimizer.rule.variants)]
    advice = f"weight_decay_mode={' or '.join(modes)}" if modes else "torch.optim's class, attached before sharding"
    return Diagnostic(
        "weight_decay_left_out",
        path,
        f"weight_decay={optimizer.left_out:g} is not applied: FBGEMM's {optimizer.rule.label} leaves it out"
        + (" in this weight_decay_mode (NONE, if none is given)." if modes else "."),
        f"leave it out; to have weight decay, use {advice}.",
        Severity.WARNING,
    )


def _value(setting: Setting, arguments: dict[str, Any]) -> Any:
    """The value of ``setting``; its names are removed from ``arguments``."""
    if len(setting.fused_params) != 1:  # one name per element
        defaults = zip(setting.fused_params, setting.default, strict=True)
        return tuple(_number(name, arguments.pop(name, default)) for name, default in defaults)
    (name,) = setting.fused_params
    return _number(name, arguments.pop(name, setting.default))


def _number(name: str, value: Any) -> float:
    """``value`` (a number or a tensor of one element) as a finite float that is not negative."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    is_share = name in BETAS.fused_params  # Adam divides by one minus it
    if not 0 <= number < (1 if is_share else math.inf):
        less = ", and less than 1" if is_share else ""
        raise _unsupported(name, value, f"{name} must be a number that is not negative{less}.")
    return number


def _unsupported(name: str, value: Any, what_to_do: str) -> ConversionError:
    return ConversionError(
        f"fused_params has {name}={value!r}, which no fused optimizer of recfx supports.",
        reason="unsupported_fused_param",
        what_to_do=what_to_do,
    )
