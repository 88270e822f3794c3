"""What the options of a command ask of ``recfx.convert``, ``recfx.explain`` and ``recfx.plan``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints

from recfx.api import HashConfig, explain
from recfx.commandline.command import WrongUsage
from recfx.commandline.given_file import GivenFile
from recfx.commandline.hashing_file import read_hashing
from recfx.planner.json_file import JsonFile, Kind

_DEDUP = {"auto": "auto", "yes": True, "no": False}


def request(given: argparse.Namespace, model: nn.Module) -> dict[str, Any]:
    """The arguments of ``recfx.convert``."""
    asked = {
        "on_unsupported": "keep" if getattr(given, "keep", True) else "error",
        "managed_collisions": given.managed_collisions,
        "backend": given.backend,
        "device": given.device,
        "dedup": _dedup(given.dedup),
    }
    if given.id_range:
        asked["id_ranges"] = dict(map(_id_range, given.id_range))
    if given.hashing is not None:
        asked["hashing"] = read_hashing(given.hashing.path, given.raw_ids, lambda: _tables(model))
    elif given.raw_ids:
        asked["hashing"] = HashConfig.raw_ids()
    return asked


_CONSTRAINTS: dict[str, Kind] = {
    "sharding_types": list,
    "compute_kernels": list,
    "min_partition": int,
    "pooling_factors": list,
    "num_poolings": list,
    "batch_sizes": list,
    "is_weighted": bool,
}
"""The fields of ``ParameterConstraints`` that a file may have; ``recfx.plan`` checks what is in them."""


def constraints(given: Sequence[str | GivenFile]) -> dict[str, ParameterConstraints]:
    """What ``--constrain`` says of each table; of what is said twice, the last."""
    settings: dict[str, dict[str, Any]] = {}
    for option in given:
        if isinstance(option, str):
            table, _, types = option.rpartition("=")
            settings.setdefault(table, {})["sharding_types"] = types.split(",")
            continue
        file = JsonFile(option.path, 'write {"users": {"sharding_types": ["row_wise"]}}, by the names of tables.')
        for table, limits in file.object(file.content, "").items():
            given_names = file.object(limits, table)
            if unknown := next((name for name in given_names if name not in _CONSTRAINTS), None):
                known = ", ".join(_CONSTRAINTS)
                raise file.refused(table, f"has an unknown key {unknown!r}; the known keys here are: {known}")
            kinds = {name: _CONSTRAINTS[name] for name in given_names}
            settings.setdefault(table, {}).update(file.fields(limits, table, kinds))
    return {table: ParameterConstraints(**limits) for table, limits in settings.items()}


def _tables(model: nn.Module) -> list[str]:
    """The names of the tables that can be converted."""
    collections = explain(model, on_unsupported="keep").collections
    return [table.name for collection in collections for table in collection.tables]


def _id_range(option: str) -> tuple[str, tuple[int, int]]:
    feature, _, bounds = option.rpartition("=")
    lowest, _, highest = bounds.partition(":")
    try:
        return feature, (int(lowest), int(highest))
    except ValueError:
        raise WrongUsage(f"--id-range {option}: write FEATURE=LOW:HIGH, such as user=0:999") from None


def _dedup(given: Sequence[str]) -> Any:
    """``yes`` for all tables, or ``table=yes`` for each of some; ``convert`` checks that there is such a table."""
    named = {}
    for option in given:
        table, _, text = option.rpartition("=")
        try:
            named[table] = _DEDUP[text] if text in _DEDUP else float(text)
        except ValueError:
            raise WrongUsage(f"--dedup {option}: {text!r} is neither auto, yes or no, nor a number") from None
    if "" in named and len(given) > 1:
        raise WrongUsage("--dedup takes one value for all tables, or table=value for each of some")
    return named.get("", named or "auto")
