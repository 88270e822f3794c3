"""Sharding plans as files of JSON, for ``python -m recfx``.

::

    {
      "version": "1",
      "world_size": 2,
      "topology": null,
      "collections": {
        "ebc": {
          "users": {
            "sharding_type": "row_wise",
            "compute_kernel": "fused",
            "ranks": [0, 1],
            "shards": [
              {"offsets": [0, 0], "sizes": [50, 8], "placement": "rank:0/cpu"},
              {"offsets": [50, 0], "sizes": [50, 8], "placement": "rank:1/cpu"}
            ]
          }
        }
      }
    }

Collections are named by their paths in the model, ``""`` if the model is one. ``shards`` is null for ``data_parallel``,
and ``world_size`` may be null. ``ranks`` are those of the shards, or all for ``data_parallel``; null and ``[]`` leave
them out. ``topology`` is what ``recfx.plan`` made the plan for, and what prices are then for, such as ``{"device":
"cuda", "local_world_size": 8, ...}``; it is null or left out if that is not known.
"""

from __future__ import annotations

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
    ShardingType,
)

from recfx.collections.sharding.whole_plan import MOST_RANKS, check_plan, rank_of, table_error
from recfx.errors import ConversionError
from recfx.kernels.build.private_files import new_file
from recfx.planner.json_file import JsonFile, Kind
from recfx.planner.priced_plan import PlanForRanks, PricedPlan, topology_of, world_size_said
from recfx.planner.pricing.values import whole_number
from recfx.planner.topology import AnyTopology, check_topology, names_of_settings, settings_of, topology_of_settings

VERSION = "1"
_WRITTEN = ("sharding_type", "compute_kernel", "ranks", "sharding_spec")


def write_plan(plan: ShardingPlan, path: str | os.PathLike[str], *, world_size: int | None = None) -> None:
    """Write a plan into a file, such as one of ``recfx.plan``.

    Example:
        >>> from recfx.planner.plan_file import read_plan, write_plan
        >>> from recfx.planner.topology import npu_topology
        >>> write_plan(recfx.plan(Model(), npu_topology(8)), "plan.json")
        >>> report = recfx.explain(Model(), plan=read_plan("plan.json"))

    Args:
        plan: the plan of a whole model.
        path: the file; one that exists is replaced, once the new one is whole.
        world_size: the number of ranks; default: those that the plan knows, if ``recfx.plan`` or ``read_plan`` made
            it.

    Raises:
        ConversionError: ``invalid_argument``, ``unsupported_plan_option``; ``plan_rank``: it was made for others.
        InputError: ``invalid_argument``: ``world_size`` is no number of ranks.
        OSError: the file cannot be written.
    """
    text = json.dumps(plain_plan(plan, world_size=world_size), indent=1) + "\n"
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():  # a pipe or a device, which stays
        place.write_text(text, encoding="utf-8")
        return
    with new_file(place) as file:
        file.path.write_text(text, encoding="utf-8")
        file.put_in_place()


def plain_plan(plan: ShardingPlan, *, world_size: int | None = None) -> dict[str, Any]:
    """What ``write_plan`` writes."""
    check_plan(plan)
    if world_size is not None:
        world_size = whole_number(world_size, "world_size", most=MOST_RANKS)
    world_size = world_size_said(plan, world_size)
    collections = {
        name: {table: _plain(sharding, table, name, world_size) for table, sharding in tables.items()}
        for name, tables in plan.plan.items()
    }
    made_for = topology_of(plan)
    topology = None if made_for is None else settings_of(made_for)
    return {"version": VERSION, "world_size": world_size, "topology": topology, "collections": collections}


def _plain(sharding: Any, table: str, path: str, world_size: int | None) -> dict[str, Any]:
    if not isinstance(sharding, ParameterSharding):
        raise table_error("invalid_argument", table, f"is {sharding!r}.", path)
    for option in fields(sharding):
        if option.name not in _WRITTEN and getattr(sharding, option.name) is not None:
            raise table_error("unsupported_plan_option", table, f"asks for {option.name}.", path)
    spec = sharding.sharding_spec
    shards = None if not isinstance(spec, EnumerableShardingSpec) else [
        {"offsets": shard.shard_offsets, "sizes": shard.shard_sizes, "placement": str(shard.placement)}
        for shard in spec.shards
    ]  # fmt: skip
    named = {"sharding_type": sharding.sharding_type, "compute_kernel": sharding.compute_kernel}
    named = {name: value.value if isinstance(value, Enum) else value for name, value in named.items()}
    for name, value in named.items():
        if not isinstance(value, str):
            raise table_error("invalid_argument", table, f"has {name}={value!r}.", path)
    rank = f"a rank of table {table!r}"
    ranks = None if sharding.ranks is None else [whole_number(number, rank, least=0) for number in sharding.ranks]
    if wrong := _wrong_ranks(named["sharding_type"], ranks, spec, world_size):
        raise table_error("invalid_argument", table, f"has ranks {wrong}.", path)
    return {**named, "ranks": ranks, "shards": shards}


def read_plan(path: str | os.PathLike[str]) -> PlanForRanks:
    """The plan in a file. Whether it fits a model is for those who use it, such as ``recfx.explain``.

    If ``recfx.plan`` made it, it is a :class:`recfx.planner.priced_plan.PricedPlan` that knows what it was made for,
    but not how it was chosen.

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
    file = JsonFile(path, "see recfx/planner/plan_file.py for the form of plans, or let write_plan there write it.")
    kinds: dict[str, Kind] = {"version": str, "world_size": (int, None), "topology": (dict, None), "collections": dict}
    whole = file.fields({"topology": None} | file.object(file.content, ""), "", kinds)
    if whole["version"] != VERSION:
        raise file.refused("version", f"is {whole['version']!r}, not {VERSION!r}")
    if (ranks := whole["world_size"]) is not None and not 0 < ranks <= MOST_RANKS:
        raise file.refused("world_size", f"is {ranks}, not a number from 1 to {MOST_RANKS:,}")
    plan: dict[str, Any] = {
        name: EmbeddingModuleShardingPlan(
            {
                table: _sharding(file, value, f"collections.{name}.{table}", ranks)
                for table, value in file.object(tables, f"collections.{name}").items()
            }
        )
        for name, tables in whole["collections"].items()
    }
    if whole["topology"] is None:
        return PlanForRanks(plan, ranks)
    return PricedPlan(plan, _topology(file, whole["topology"], ranks))


def _topology(file: JsonFile, settings: dict[str, Any], world_size: int | None) -> AnyTopology:
    if world_size is None:
        raise file.refused("world_size", "is null, but there is a topology")
    device = settings.get("device")
    if device not in ("cpu", "cuda", "npu"):
        raise file.refused("topology.device", f"is {device!r}, neither cpu nor cuda nor npu")
    kinds: dict[str, Kind] = dict.fromkeys(names_of_settings(device), (int, float))
    try:
        topology = topology_of_settings(file.fields(settings, "topology", kinds | {"device": str}), world_size)
        return check_topology(topology)
    except ConversionError as error:
        if error.reason == "invalid_file":
            raise
        raise file.refused("topology", f"cannot be: {error.message.rstrip('.')}") from error


def _sharding(file: JsonFile, value: Any, where: str, world_size: int | None) -> ParameterSharding:
    optional = (list, None)
    kinds: dict[str, Kind] = {"sharding_type": str, "compute_kernel": str, "ranks": optional, "shards": optional}
    given = file.fields(value, where, kinds)
    spec = None
    if given["shards"] is not None:
        shards = [_shard(file, shard, f"{where}.shards[{number}]") for number, shard in enumerate(given["shards"])]
        try:
            spec = EnumerableShardingSpec(shards)
        except ValueError as error:  # shards overlap
            raise file.refused(f"{where}.shards", f"cannot be: {error}") from error
    ranks = None if given["ranks"] is None else file.integers(given["ranks"], f"{where}.ranks")
    if wrong := _wrong_ranks(given["sharding_type"], ranks, spec, world_size):
        raise file.refused(f"{where}.ranks", f"are {wrong}")
    return ParameterSharding(given["sharding_type"], given["compute_kernel"], ranks, spec)


def _wrong_ranks(sharding_type: Any, ranks: list[int] | None, spec: object, world_size: int | None) -> str:
    """What contradicts the ranks of a table, which nobody reads where its shards say where they are; otherwise "".

    Ranks may be listed in any order, and a plan may leave them out.
    """
    if not ranks:
        return ""
    ranks = sorted(ranks)
    if isinstance(spec, EnumerableShardingSpec):
        placed = [rank_of(shard) for shard in spec.shards]
        named = sorted(rank for rank in placed if rank is not None)
        return f"{ranks}, but the shards are on {named}" if len(named) == len(placed) and named != ranks else ""
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        everybody = list(range(world_size or len(ranks)))
        return f"{ranks}, but data_parallel is on all of {len(everybody)}" if ranks != everybody else ""
    return ""


def _shard(file: JsonFile, value: Any, where: str) -> ShardMetadata:
    given = file.fields(value, where, {"offsets": list, "sizes": list, "placement": str})
    offsets, sizes = (file.integers(given[name], f"{where}.{name}") for name in ("offsets", "sizes"))
    try:
        return ShardMetadata(offsets, sizes, given["placement"])
    except (ValueError, RuntimeError) as error:  # the latter of an unknown device
        raise file.refused(where, f"cannot be: {error}") from error
