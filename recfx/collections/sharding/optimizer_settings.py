"""Which fused optimizer each table of a sharded collection gets: the one TorchRec would use, and what to report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import kind_of
from recfx.errors import ConversionError, Diagnostic, Severity
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.fused_params import fused_optimizer_from_params, optimizer_from_params, weight_decay_left_out


@dataclass(frozen=True)
class OptimizerSettings:
    """Rule and settings of the tables with a fused optimizer, and the choices behind them; both by table name."""

    fused: dict[str, FusedOptimizer]
    taken: dict[str, tuple[Diagnostic, ...]]


def optimizer_settings(
    module: UnshardedCollection,
    sharding: CollectionSharding,
    fused_params: Mapping[str, Any] | None,
    *,
    dense_as_torchrec: bool,
) -> OptimizerSettings:
    """The optimizer that trains each table.

    On kernel ``fused`` it is the one that TorchRec would use: the table's optimizer in backward, with ``fused_params``
    and then FBGEMM's defaults for settings that were not given; without such an optimizer, that of ``fused_params``;
    and without either, FBGEMM's SGD. On kernel ``dense`` (data-parallel tables) an optimizer in backward is also
    carried out, as for the unsharded table, and so are ``fused_params`` for data-parallel tables.

    Args:
        fused_params: TorchRec's dict.
        dense_as_torchrec: leave tables on kernel ``dense`` to an ordinary optimizer, whatever is attached to them:
            TorchRec does so, and scripts written for it list them there.

    Returns:
        New settings without the parameter, which would keep the whole table in memory.

    Raises:
        ConversionError: ``unsupported_fused_param``.
    """
    all_settings, attached = OptimizerSettings({}, {}), module.take_over_optimizers()
    for sharded in sharding.tables:
        name = sharded.table.name
        own, path = attached.get(name), kind_of(module).table_path(module.collection, name)
        if sharded.compute_kernel == "fused":
            chosen = _fused(module, sharded, own, fused_params, path)
        elif dense_as_torchrec:
            chosen = (None, _left_out(own, fused_params, path))
        elif own is not None:
            chosen = (_without_parameter(own), ())
        elif fused_params and sharded.is_replicated:  # TorchRec's planner only knows these with dense kernels
            chosen = _from_params(fused_params, path)
        else:
            chosen = (None, ())
        settings, taken = chosen
        if settings is not None:
            all_settings.fused[name] = settings
        if taken:
            all_settings.taken[name] = taken
    return all_settings


def check_optimizers(module: UnshardedCollection) -> None:
    """Refuse optimizers in backward without a fused form, which would stay behind on the whole table.

    Raises:
        ConversionError: the code for which the optimizer has none.
    """
    module.take_over_optimizers()
    for table, why in module.not_fused.items():
        raise ConversionError(
            f"the optimizer in backward of table {table!r} cannot be sharded: {why.message}",
            reason=why.code,
            module_path=module.collection,
            what_to_do=why.what_to_do,
        )


def _fused(
    module: UnshardedCollection,
    sharded: ShardedTable,
    own: FusedOptimizer | None,
    fused_params: Mapping[str, Any] | None,
    path: str,
) -> tuple[FusedOptimizer | None, tuple[Diagnostic, ...]]:
    if own is not None:
        return _completed(own, fused_params, path)
    if fused_params:
        return _from_params(fused_params, path)
    if not module.weight(sharded.table.name).requires_grad:
        return None, ()
    settings = fused_optimizer_from_params({})
    message = (
        f"it is on kernel 'fused' and no optimizer was given for it: it trains by {settings.rule.label} with "
        f"lr={settings.group['lr']} "
        "in backward, which is TorchRec's default, and no other optimizer sees it."
    )
    advice = "attach one with apply_optimizer_in_backward before sharding, or give the sharders fused_params."
    return settings, (Diagnostic("default_fused_optimizer", path, message, advice),)


def _from_params(fused_params: Mapping[str, Any], path: str) -> tuple[FusedOptimizer | None, tuple[Diagnostic, ...]]:
    optimizer = fused_optimizer_from_params(fused_params)
    return optimizer, _about_decay(optimizer, optimizer.group, fused_params, path)


def _completed(
    own: FusedOptimizer, fused_params: Mapping[str, Any] | None, path: str
) -> tuple[FusedOptimizer, tuple[Diagnostic, ...]]:
    """The optimizer in backward; settings that were not given are FBGEMM's defaults, not those of its class."""
    settings = _without_parameter(own)
    if own.chosen is None:
        return settings, ()
    changed = []
    theirs = optimizer_from_params(own.rule, fused_params or {})
    if theirs.rule is not own.rule:
        changed.append(f"weight_decay_mode={(fused_params or {})['weight_decay_mode']}")
        settings = FusedOptimizer(theirs.rule, settings.group)
    for name, value in theirs.group.items():
        if name not in own.chosen and settings.group.get(name) != value:
            changed.append(f"{name}={value} (the class has {settings.group.get(name)})")
            settings.group[name] = value
    decays = theirs if "weight_decay" not in own.chosen else own if own.left_out else None
    taken = [] if decays is None else list(_about_decay(decays, settings.group, fused_params or {}, path))
    if changed:
        message = f"its {own.rule.name} was attached without {', '.join(changed)}, TorchRec's value for sharded tables."
        advice = "name the setting where you attach the optimizer."
        taken.append(Diagnostic("default_optimizer_setting", path, message, advice))
    mode = (fused_params or {}).get("weight_decay_mode") or WeightDecayMode.NONE
    if decays is None and mode not in settings.rule.decay_modes and settings.group.get("weight_decay"):
        message = (
            f"weight_decay={settings.group['weight_decay']} of its {own.rule.name} is added to the gradients of "
            "touched rows, as the optimizer's class does; TorchRec's sharded tables ignore it, or take it off the "
            "weights."
        )
        advice = "nothing if that is intended; otherwise leave it out."
        taken.append(Diagnostic("weight_decay_unlike_torchrec", path, message, advice))
    return settings, tuple(taken)


def _about_decay(
    optimizer: FusedOptimizer, group: Mapping[str, Any], fused_params: Mapping[str, Any], path: str
) -> tuple[Diagnostic, ...]:
    """What to say about the weight decay of ``fused_params``, or of one of TorchRec's placeholders."""
    if optimizer.left_out:
        return (weight_decay_left_out(optimizer, path),)
    if not group.get("weight_decay") or WeightDecayMode.NONE in optimizer.rule.decay_modes:
        return ()
    mode = WeightDecayMode(fused_params["weight_decay_mode"]).name
    message = (
        f"weight_decay={group['weight_decay']:g} is applied as weight_decay_mode={mode} asks, and as FBGEMM's kernels "
        "for GPUs do; those for the CPU leave it out."
    )
    return (Diagnostic("weight_decay_unlike_torchrec", path, message, "nothing if that is intended."),)


def _left_out(own: FusedOptimizer | None, fused_params: Mapping[str, Any] | None, path: str) -> tuple[Diagnostic, ...]:
    if own is None and not fused_params:
        return ()
    what = f"its {own.rule.name} in backward" if own is not None else "fused_params"
    message = f"{what} is not carried out: on kernel 'dense' it has ordinary gradients, as in TorchRec."
    advice = "step it with the model's ordinary optimizer, or pass sharders=recfx.sharders() to have it fused, too."
    severity = Severity.WARNING if own is not None else Severity.INFO  # whoever attached it thinks that it trains
    return (Diagnostic("dense_kernel_not_fused", path, message, advice, severity),)


def _without_parameter(own: FusedOptimizer) -> FusedOptimizer:
    group = {key: value for key, value in own.group.items() if key != "params"}
    return FusedOptimizer(own.rule, group)
