"""What the options of a conversion ask of ``recfx.convert`` and of ``recfx.explain``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import nn

from recfx.api import HashConfig, explain
from recfx.commandline.command import WrongUsage
from recfx.commandline.hashing_file import read_hashing

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
