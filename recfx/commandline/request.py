"""What the options of a command ask of ``recfx.convert``, ``recfx.explain`` and ``recfx.plan``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints

from recfx.api import HashConfig, explain
from recfx.commandline.command import WrongUsage
from recfx.commandline.given_file import GivenFile
from recfx.commandline.hashing_file import read_hashing
from recfx.planner.json_file import JsonFile, Kind

_Value = TypeVar("_Value")
_DEDUP = {"auto": "auto", "yes": True, "no": False}


def request(given: argparse.Namespace, model: nn.Module) -> dict[str, Any]:
    """The arguments of ``recfx.convert``."""
    asked = {
        "on_unsupported": "keep" if getattr(given, "keep", True) else "error",
        "managed_collisions": given.managed_collisions,
        "backend": given.backend,
        "device": given.device,
    }
    if given.dedup:
        refusal = "is neither auto, yes or no, nor a number"
        asked["dedup"] = for_tables("--dedup", given.dedup, "value", _dedup, refusal)
    if given.id_range:
        refusal = "are no bounds: write FEATURE=LOW:HIGH, such as user=0:999"
        asked["id_ranges"] = by_name("--id-range", given.id_range, _bounds, refusal)
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


def _bounds(text: str) -> tuple[int, int]:
    lowest, _, highest = text.partition(":")
    return int(lowest), int(highest)


def _dedup(text: str) -> object:
    return _DEDUP[text] if text in _DEDUP else float(text)


def by_name(option: str, given: Sequence[str], read: Callable[[str], _Value], refusal: str) -> dict[str, _Value]:
    """What an option that may be repeated says of each name, as ``NAME=VALUE``; of ``""``, what a value alone says.

    Args:
        option: as it is typed.
        given: what follows it, each time.
        read: makes a value of its text, or raises a ``ValueError``.
        refusal: what follows the text in the message then.
    """
    values: dict[str, _Value] = {}
    for said in given:
        name, _, text = said.rpartition("=")
        if name in values:
            raise WrongUsage(f"{option} {said}: there is another value for {name or 'all'}")
        try:
            values[name] = read(text)
        except ValueError:
            raise WrongUsage(f"{option} {said}: {text!r} {refusal}") from None
    return values


def for_tables(
    option: str, given: Sequence[str], what: str, read: Callable[[str], object] = str, refusal: str = ""
) -> Any:
    """A value for all tables, or values by table, whose names are checked later; ``None`` without the option."""
    named = by_name(option, given, read, refusal)
    if "" in named and len(named) > 1:
        raise WrongUsage(f"{option} takes one {what} for all tables, or table={what} for each of some")
    return named.get("", named or None)
