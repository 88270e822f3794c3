"""Which fused optimizer each table of a sharded collection gets, and the settings that all ranks must have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import kind_of
from recfx.errors import ConversionError, Diagnostic, Severity
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.ir.tables import TableSpec
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.fused_params import fused_optimizer_from_params, optimizer_from_params, weight_decay_left_out
from recfx.versions import __version__


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
    """The optimizer that trains each table: new settings without the parameter, which would keep the whole table in
    memory.

    On kernel ``fused`` it is the one that TorchRec would use: the table's optimizer in backward, with ``fused_params``
    and then FBGEMM's defaults for settings that were not given; without such an optimizer, that of ``fused_params``;
    and without either, FBGEMM's SGD. On kernel ``dense`` (data-parallel tables) an optimizer in backward is also
    carried out, as for the unsharded table, and so are ``fused_params`` for data-parallel tables. With
    ``dense_as_torchrec``, tables on kernel ``dense`` are left to an ordinary optimizer, as scripts for TorchRec expect.
    """
    all_settings, attached = OptimizerSettings({}, {}), module.fused_optimizers()
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
    """Refuse optimizers in backward without a fused form, which would stay behind on the whole table."""
    module.fused_optimizers()
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


# What must be alike on all ranks, besides the plan: otherwise replicas and shards diverge

Settings = dict[tuple[str, str], str]
"""The value of each setting, by the name of the table (``""`` for the collection) and of the setting."""

_SAME = "make and convert the model with the same arguments on every rank."
_ADVICE = {
    "HashConfig.seed": "draw the seed once: seed = [secrets.randbits(62)] on every rank, then "
    "torch.distributed.broadcast_object_list(seed), which sends that of rank 0, and HashConfig(seed=seed[0]).",
    "version of recfx": "install one version on all hosts.",
    "version of torch": "install one version on all hosts.",
}


def settings_of(
    module: UnshardedCollection, tables: tuple[TableSpec, ...], sharder: Mapping[str, Any], fused_params: Any
) -> Settings:
    """The settings of a collection on this rank, whose ``tables`` are as they are to be sharded, with the options of
    its sharder. What only this rank's own work depends on is left out: devices, kernel targets, ranges of ids, settings
    of optimizers that choose among implementations.
    """
    settings: dict[tuple[str, str], Any] = {
        ("", "version of recfx"): __version__,
        ("", "version of torch"): torch.__version__.split("+")[0],
        ("", "tables"): [table.name for table in tables],
        ("", "is_weighted"): module.is_weighted(),
        ("", "batches_in_flight"): module.batches_in_flight,
        ("", "passes"): None if module.passes is None else [made.name for made in module.passes],
        **{("", name): value for name, value in sharder.items()},
        **{("", f"fused_params.{name}"): value for name, value in (fused_params or {}).items()},
    }
    optimizers = module.fused_optimizers()
    for table in tables:
        own = _fields(table) | _fields(table.dedup, "dedup.") | _fields(table.hashing, "HashConfig.")
        for name in ("name", "id_range", "dedup", "hashing"):
            del own[name]
        own["requires_grad"], own["optimizer"] = module.weight(table.name).requires_grad, None
        if table.name in optimizers:
            own |= _of_optimizer(optimizers[table.name])
        settings |= {(table.name, name): value for name, value in own.items()}
    return {key: _words(value) for key, value in settings.items()}


def digest(settings: Settings) -> str:
    """A short text that is equal for equal settings."""
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()


def different_settings(mine: Settings, theirs: Settings, ranks: tuple[int, int], path: str) -> ConversionError:
    """The error that names the first setting in which two ranks differ."""
    key = next(key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key))
    table, name = key
    where = f"{name} of table {table!r}" if table else name
    values = [
        f"{settings.get(key, 'absent')} on rank {rank}" for settings, rank in zip((mine, theirs), ranks, strict=True)
    ]
    return ConversionError(
        f"ranks shard one collection with different settings: {where} is {' and '.join(values)}.",
        reason="ranks_have_different_settings",
        module_path=path,
        what_to_do=_ADVICE.get(name, _SAME),
    )


def _fields(value: Any, prefix: str = "") -> dict[str, Any]:
    return {} if value is None else {f"{prefix}{field.name}": getattr(value, field.name) for field in fields(value)}


def _of_optimizer(optimizer: FusedOptimizer) -> dict[str, Any]:
    kind, *values = optimizer.settings()
    names = [f"optimizer.{setting.name}" for setting in optimizer.rule.settings]
    starts = {f"optimizer: first {name}": start for name, start in optimizer.starts().items()}
    return {"optimizer": kind, **dict(zip(names, values, strict=True)), **starts}


def _words(value: Any) -> str:
    """The value in words that are the same in every process."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_words, value))})"
    is_plain = value is None or isinstance(value, (bool, int, float, str, Enum, torch.dtype))
    return repr(value) if is_plain else type(value).__name__
