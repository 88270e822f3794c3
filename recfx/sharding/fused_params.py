"""``fused_params``: TorchRec's dict of arguments for FBGEMM, read as a fused optimizer of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from recfx.errors import ConversionError
from recfx.optim.fused_optimizer import FusedOptimizer

KINDS: Mapping[EmbOptimType, str] = {
    EmbOptimType.SGD: "sgd",
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.ROWWISE_ADAGRAD: "rowwise_adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
    EmbOptimType.ADAM: "adam",
}

# What FBGEMM's SplitTableBatchedEmbeddingBagsCodegen takes for a setting that is not given.
DEFAULTS: Mapping[str, float] = {
    "learning_rate": 0.01,
    "eps": 1e-8,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
}

# Entries that change nothing at these values; None is always one of them.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "momentum": (0, 0.0),  # FBGEMM's default is 0.9, for LARS-SGD alone; who writes it down wants momentum
    "eta": (0.001,),  # LARS-SGD's
    "gradient_clipping": (False,),
    "max_gradient": (1.0,),  # without gradient_clipping it is not looked at
    "max_norm": (0.0,),
    "weight_decay_mode": (WeightDecayMode.NONE, WeightDecayMode.L2),
    "stochastic_rounding": (False,),
    "output_dtype": (SparseType.FP32,),
    "bounds_check_mode": (BoundsCheckMode.WARNING, BoundsCheckMode.FATAL),  # ids out of range are an error here
    "enforce_hbm": (False, True),  # tables are never anywhere else
    "cache_algorithm": (CacheAlgorithm.LRU,),
    "cache_load_factor": (0.2,),
    "cache_sets": (0,),
    "cache_reserved_memory": (0.0,),
    "cache_precision": (),
    "prefetch_pipeline": (False,),
}

# What each rule reads; eps and betas of a rule that has none are as meaningless as they are for FBGEMM.
_READS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("lr", "weight_decay"),
    "adagrad": ("lr", "eps", "weight_decay"),
    "rowwise_adagrad": ("lr", "eps", "weight_decay"),
    "adam": ("lr", "eps", "betas", "weight_decay"),
}


def fused_optimizer_from_params(params: Mapping[str, Any]) -> FusedOptimizer:
    """The optimizer of one table; every call makes one with a group of its own.

    Without ``optimizer`` it is exact SGD, FBGEMM's default. ``weight_decay`` is added to the gradient, as
    ``torch.optim`` does it and FBGEMM with ``WeightDecayMode.L2``.

    Args:
        params: ``optimizer`` (an ``EmbOptimType``), ``learning_rate``, ``eps``, ``beta1``, ``beta2``,
            ``weight_decay``; other arguments of FBGEMM's only at values that change nothing.

    Raises:
        ConversionError: ``unsupported_fused_param``.
    """
    given = {name: value for name, value in params.items() if value is not None}
    optimizer = given.pop("optimizer", EmbOptimType.EXACT_SGD)
    kind = KINDS.get(optimizer) if isinstance(optimizer, EmbOptimType) else None
    if kind is None:
        raise _unsupported("optimizer", optimizer, f"use one of {', '.join(f'EmbOptimType.{k.name}' for k in KINDS)}.")
    values = {name: _number(name, given.pop(name, default)) for name, default in DEFAULTS.items()}
    if values["weight_decay"]:
        _check_weight_decay(kind, values["weight_decay"], given.get("weight_decay_mode"))
    for name, value in given.items():
        if name not in NEUTRAL:
            known = ", ".join(("optimizer", *DEFAULTS))
            raise _unsupported(name, value, f"leave it out; known are {known}.")
        if value not in NEUTRAL[name]:
            raise _unsupported(name, value, f"leave {name} out.")
    group = {
        "lr": values["learning_rate"],
        "eps": values["eps"],
        "betas": (values["beta1"], values["beta2"]),
        "weight_decay": values["weight_decay"],
    }
    return FusedOptimizer(kind, {name: group[name] for name in _READS[kind]})


def _number(name: str, value: Any) -> float:
    """``value`` (a number or a tensor of one element) as a finite float that is not negative."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise _unsupported(name, value, f"{name} must be a number that is not negative.")
    return number


def _check_weight_decay(kind: str, weight_decay: float, mode: Any) -> None:
    if kind == "adam":
        raise _unsupported(
            "weight_decay",
            weight_decay,
            "FBGEMM's Adam takes it off the weights (AdamW), ours adds it to the gradient: leave it out, or attach "
            "torch.optim.Adam(weight_decay=...) with apply_optimizer_in_backward if that is the rule you mean.",
        )
    if mode is WeightDecayMode.NONE:
        raise _unsupported(
            "weight_decay_mode", mode, "use WeightDecayMode.L2, or no weight_decay: FBGEMM would ignore it."
        )


def _unsupported(name: str, value: Any, what_to_do: str) -> ConversionError:
    return ConversionError(
        f"fused_params has {name}={value!r}, which no fused optimizer here carries out.",
        reason="unsupported_fused_param",
        what_to_do=what_to_do,
    )
