"""Sharding plans as files of JSON, for ``python -m recfx``.

::

    {"version": "1", "world_size": 2, "topology": null, "collections": {"ebc": {"users": {
        "sharding_type": "row_wise", "compute_kernel": "fused", "ranks": [0, 1],
        "shards": [{"offsets": [0, 0], "sizes": [50, 8], "placement": "rank:0/cpu"},
                   {"offsets": [50, 0], "sizes": [50, 8], "placement": "rank:1/cpu"}]}}}}

Collections are named by their paths in the model, ``""`` if the model is one. ``shards`` is null for ``data_parallel``;
``world_size`` and ``ranks`` may be null. ``topology`` is what ``recfx.plan`` made the plan for, and what prices are
then for, such as ``{"device": "cuda", "local_world_size": 8, ...}``; it is null or left out if that is not known.
"""

import json
import os
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
)

from recfx.collections.sharding.plan import MOST_RANKS, check_plan
from recfx.collections.sharding.types import table_error
from recfx.errors import ConversionError, printable
from recfx.kernels.build.private_files import new_file
from recfx.planner.priced_plan import PricedPlan, world_size_said
from recfx.planner.topology import check_topology, settings_of, topology_of_settings

VERSION = "1"
_WRITTEN = ("sharding_type", "compute_kernel", "ranks", "sharding_spec")


def write_plan(plan: ShardingPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan into a file, such as one of ``recfx.plan``.

    Example:
        >>> from recfx.planner.plan_file import read_plan, write_plan
        >>> from recfx.planner.topology import npu_topology
        >>> write_plan(recfx.plan(Model(), npu_topology(8)), "plan.json")
        >>> report = recfx.explain(Model(), plan=read_plan("plan.json"))

    Args:
        plan: the plan of a whole model.
        path: the file; one that exists is replaced, once the new one is whole.

    Raises:
        ConversionError: ``invalid_argument``, ``unsupported_plan_option``.
        OSError: the file cannot be written.
    """
    text = json.dumps(plain_plan(plan), indent=1) + "\n"
    place = Path(os.path.realpath(path))
    with new_file(place) as file:
        file.path.write_text(text, encoding="utf-8")
        file.put_in_place()


def plain_plan(plan: ShardingPlan) -> dict[str, Any]:
    """What ``write_plan`` writes."""
    check_plan(plan)
    made_for = getattr(plan, "topology", None)
    return {
        "version": VERSION,
        "world_size": world_size_said(plan),
        "topology": None if made_for is None else settings_of(made_for),
        "collections": {
            path: {table: _plain(sharding, table, path) for table, sharding in tables.items()}
            for path, tables in plan.plan.items()
        },
    }


def _plain(sharding: Any, table: str, path: str) -> dict[str, Any]:
    if not isinstance(sharding, ParameterSharding):
        raise table_error("invalid_argument", table, f"is {sharding!r}.", path)
    for option in fields(sharding):
        if option.name not in _WRITTEN and getattr(sharding, option.name) is not None:
            raise table_error("unsupported_plan_option", table, f"asks for {option.name}.", path)
    spec = sharding.sharding_spec
    shards = [
        {"offsets": shard.shard_offsets, "sizes": shard.shard_sizes, "placement": str(shard.placement)}
        for shard in (spec.shards if isinstance(spec, EnumerableShardingSpec) else ())
    ]
    named = {name: getattr(sharding, name) for name in _WRITTEN[:3]}
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in named.items()}
    return plain | {"shards": shards or None}


def read_plan(path: str | os.PathLike[str]) -> PricedPlan:
    """The plan in a file, which knows what ``recfx.plan`` made it for; those who use it see whether it fits a model.

    Example:
        >>> from recfx.planner.plan_file import read_plan, write_plan
        >>> from recfx.planner.topology import npu_topology
        >>> write_plan(recfx.plan(Model(), npu_topology(8)), "plan.json")
        >>> read_plan("plan.json").world_size
        8

    Raises:
        ConversionError: ``invalid_file``: it cannot be read, is no such file, or not a whole one; the message says
            where.
    """
    try:
        return _plan(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise ConversionError(
            f"{path}: {printable(repr(error))}.",
            reason="invalid_file",
            what_to_do="see recfx/planner/plan_file.py for the form of plans, or let write_plan there write it.",
        ) from error


def _plan(version: str, collections: Any, world_size: Any = None, topology: Any = None) -> PricedPlan:
    """The content of a file; any error if it is none."""
    if version != VERSION:
        raise ValueError(f"version is {version!r}, not {VERSION!r}")
    if world_size is not None and not (type(world_size) is int and 0 < world_size <= MOST_RANKS):
        raise ValueError(f"world_size is {world_size!r}, not a number from 1 to {MOST_RANKS:,}")
    plan: dict[str, Any] = {}
    for path, tables in collections.items():
        plan[path] = EmbeddingModuleShardingPlan()
        for table, given in tables.items():
            try:
                plan[path][table] = _sharding(**given)
            except (LookupError, TypeError, ValueError, RuntimeError) as error:  # the last of an unknown device
                raise ValueError(f"collections.{path}.{table} cannot be: {error!r}") from error
    made_for = None if topology is None else check_topology(topology_of_settings(world_size=world_size, **topology))
    return PricedPlan(plan, world_size, made_for)


def _sharding(sharding_type: str, compute_kernel: str, ranks: Any, shards: Any) -> ParameterSharding:
    if ranks is not None and not all(type(rank) is int for rank in ranks):
        raise ValueError(f"ranks are {ranks!r}")
    spec = None if shards is None else EnumerableShardingSpec(
        [ShardMetadata(shard["offsets"], shard["sizes"], shard["placement"]) for shard in shards]
    )  # fmt: skip
    return ParameterSharding(sharding_type, compute_kernel, ranks, spec)
