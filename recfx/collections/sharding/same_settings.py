"""What must be alike on all ranks that shard a collection, besides the plan: otherwise replicas and shards diverge."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

import torch

from recfx.collections.collection import UnshardedCollection
from recfx.errors import ConversionError
from recfx.ir.tables import TableSpec
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.versions import __version__

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
    """The settings of a collection on this rank.

    What only this rank's own work depends on is left out: devices, kernel targets, ranges of ids, settings of
    optimizers that choose among implementations.

    Args:
        module: the collection.
        tables: its tables as they are to be sharded.
        sharder: the options of its sharder.
        fused_params: those of its sharder, or None.
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
    optimizers = module.take_over_optimizers()
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
    """The error that names the first setting in which two ranks differ.

    Args:
        mine: the settings of the first of them.
        theirs: those of the second.
        ranks: which ranks they are.
        path: fully qualified name of the collection.
    """
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
