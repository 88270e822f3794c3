"""Which fused optimizer each table of a sharded collection gets, and the settings that all ranks must have alike."""

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import kind_of
from recfx.errors import ConversionError, Diagnostic, Severity
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import TableSpec
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.fused_params import fused_optimizer_from_params, optimizer_from_params, weight_decay_left_out
from recfx.versions import __version__


class OptimizerSettings(NamedTuple):
    """Rule and settings of the tables with a fused optimizer, and the choices behind them; both by table name."""

    fused: dict[str, FusedOptimizer]
    taken: dict[str, tuple[Diagnostic, ...]]


_Chosen = tuple[FusedOptimizer | None, list[Diagnostic]]


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
    settings, attached, params = OptimizerSettings({}, {}), module.fused_optimizers(), fused_params or {}
    for sharded in sharding.tables:
        name = sharded.table.name
        own, path = attached.get(name), kind_of(module).table_path(module.collection, name)
        chosen, taken = None, list[Diagnostic]()
        if sharded.compute_kernel == "fused":
            if own is not None:
                chosen, taken = _completed(own, params, path)
            elif params:
                chosen, taken = _from_params(params, path)
            elif module.weight(name).requires_grad:
                chosen, taken = _by_default(path)
        elif dense_as_torchrec:
            taken = _left_out(own, path) if own is not None or params else []
        elif own is not None:
            chosen = own.without_parameter()
        elif params and sharded.is_replicated:  # TorchRec's planner only knows these with dense kernels
            chosen, taken = _from_params(params, path)
        if chosen is not None:
            settings.fused[name] = chosen
        if taken:
            settings.taken[name] = tuple(taken)
    return settings


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


def _by_default(path: str) -> _Chosen:
    chosen = fused_optimizer_from_params({})
    message = (
        f"it is on kernel 'fused' and no optimizer was given for it: it trains by {chosen.rule.label} with "
        f"lr={chosen.group['lr']} in backward, which is TorchRec's default, and no other optimizer sees it."
    )
    advice = "attach one with apply_optimizer_in_backward before sharding, or give the sharders fused_params."
    return chosen, [Diagnostic("default_fused_optimizer", path, message, advice)]


def _from_params(params: Mapping[str, Any], path: str) -> _Chosen:
    optimizer = fused_optimizer_from_params(params)
    return optimizer, _about_decay(optimizer, optimizer.group, params, path)


def _completed(own: FusedOptimizer, params: Mapping[str, Any], path: str) -> _Chosen:
    """The optimizer in backward; settings that were not given are FBGEMM's defaults, not those of its class."""
    chosen = own.without_parameter()
    if own.chosen is None:
        return chosen, []
    changed = []
    theirs = optimizer_from_params(own.rule, params)
    if theirs.rule is not own.rule:
        changed.append(f"weight_decay_mode={params['weight_decay_mode']}")
        chosen = FusedOptimizer(theirs.rule, chosen.group)
    for name, value in theirs.group.items():
        if name not in own.chosen and chosen.group.get(name) != value:
            changed.append(f"{name}={value} (the class has {chosen.group.get(name)})")
            chosen.group[name] = value
    decays = theirs if "weight_decay" not in own.chosen else own if own.left_out else None
    taken = [] if decays is None else _about_decay(decays, chosen.group, params, path)
    if changed:
        message = f"its {own.rule.name} was attached without {', '.join(changed)}, TorchRec's value for sharded tables."
        advice = "name the setting where you attach the optimizer."
        taken.append(Diagnostic("default_optimizer_setting", path, message, advice))
    decay, mode = chosen.group.get("weight_decay"), params.get("weight_decay_mode") or WeightDecayMode.NONE
    if decays is None and decay and mode not in chosen.rule.decay_modes:
        what = f"is added to the gradients of touched rows, as torch's {own.rule.name} does; TorchRec's sharded tables"
        taken.append(_unlike_torchrec(decay, f"{what} ignore it, or take it off the weights.", path))
    return chosen, taken


def _about_decay(
    optimizer: FusedOptimizer, group: Mapping[str, Any], params: Mapping[str, Any], path: str
) -> list[Diagnostic]:
    """What to say about the weight decay of ``fused_params``, or of one of TorchRec's placeholders."""
    if optimizer.left_out:
        return [weight_decay_left_out(optimizer, path)]
    if not group.get("weight_decay") or WeightDecayMode.NONE in optimizer.rule.decay_modes:
        return []
    mode = WeightDecayMode(params["weight_decay_mode"]).name
    what = f"is applied as weight_decay_mode={mode} asks, and as FBGEMM's kernels for GPUs do; not those for the CPU."
    return [_unlike_torchrec(group["weight_decay"], what, path)]


def _unlike_torchrec(decay: float, what: str, path: str) -> Diagnostic:
    message = f"weight_decay={decay:g} {what}"
    return Diagnostic("weight_decay_unlike_torchrec", path, message, "leave it out, unless that is intended.")


def _left_out(own: FusedOptimizer | None, path: str) -> list[Diagnostic]:
    what = f"its {own.rule.name} in backward" if own is not None else "fused_params"
    message = f"{what} is not carried out: on kernel 'dense' it has ordinary gradients, as in TorchRec."
    advice = "step it with the model's ordinary optimizer, or pass sharders=recfx.sharders() to have it fused, too."
    severity = Severity.WARNING if own is not None else Severity.INFO  # whoever attached it thinks that it trains
    return [Diagnostic("dense_kernel_not_fused", path, message, advice, severity)]


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


def different_settings(key: tuple[str, str], of_ranks: Mapping[int, str], path: str) -> ConversionError:
    """The error that names a setting, by table and name, and its values on two ranks."""
    table, name = key
    where = f"{name} of table {table!r}" if table else name
    values = " and ".join(f"{value} on rank {rank}" for rank, value in of_ranks.items())
    return ConversionError(
        f"ranks shard one collection with different settings: {where} is {values}.",
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
