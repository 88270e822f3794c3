"""Whoever is given a plan refuses what is none, with a reason code: drawings, costs, reports and conversions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)

import recfx
from recfx.errors import RecfxError
from recfx.planner.topology import npu_topology
from tests.builders.collections import tables_named
from tests.support.fake_group import fake_group


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = tables_named("a")


def one_table(ranks: Any, *shards: ShardMetadata) -> ShardingPlan:
    spec = EnumerableShardingSpec(list(shards)) if shards else None
    return ShardingPlan(
        {"ebc": EmbeddingModuleShardingPlan({"a": ParameterSharding("table_wise", "fused", ranks, spec)})}
    )


def _draw(plan: Any, folder: Path) -> None:
    recfx.draw(Model(), folder / "model.html", plan=plan, world_size=1)


def _cost(plan: Any, folder: Path) -> None:
    recfx.cost(Model(), plan=plan, world_size=1)


def _explain(plan: Any, folder: Path) -> None:
    report = recfx.explain(Model(), plan=plan, world_size=1)
    if not report.ok:
        raise RecfxError(report.reasons[0].message, reason=report.reasons[0].code)


def _convert(plan: Any, folder: Path) -> None:
    with fake_group(0, 2) as group:
        recfx.convert(Model(), plan=plan, env=ShardingEnv.from_process_group(group))


PLANS = {
    "none": (ShardingPlan(None), "invalid_argument"),
    "list": (ShardingPlan(["ebc"]), "invalid_argument"),
    "of_one_collection": (one_table([0]).plan["ebc"], "invalid_argument"),
    "no_tables": (ShardingPlan({"ebc": None}), "invalid_argument"),
    "no_sharding": (ShardingPlan({"ebc": {"a": 5}}), "invalid_argument"),
    "text": (one_table(["0"]), "plan_rank"),
    "fraction": (one_table([0.0]), "plan_rank"),
    "negative": (one_table([-1]), "plan_rank"),
    "billion": (one_table([10**9]), "plan_rank"),
    "one_number": (one_table(0), "plan_invalid"),
    "one_dimension": (one_table([0], ShardMetadata([0], [10], "rank:0/cpu")), "plan_invalid"),
}


@pytest.mark.parametrize("use", [_draw, _cost, _explain, _convert])
@pytest.mark.parametrize("name", PLANS)
def test_is_refused(name: str, use: Callable[[Any, Path], None], tmp_path: Path) -> None:
    plan, reason = PLANS[name]
    with pytest.raises(RecfxError) as caught:
        use(plan, tmp_path)
    assert caught.value.reason == reason
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("world_size", [4, 16])
def test_ranks_for_which_there_is_no_plan(world_size: int, tmp_path: Path) -> None:
    """That of ``recfx.plan`` is for the ranks of the topology."""
    for arguments in ({"topology": npu_topology(8)}, {}):
        with pytest.raises(RecfxError, match=r"^\[invalid_argument\] world_size is given, but no plan"):
            recfx.draw(Model(), tmp_path / "model.html", **arguments, world_size=world_size)
        with pytest.raises(RecfxError, match=r"^\[invalid_argument\] world_size is given, but no plan"):
            recfx.cost(Model(), **arguments, world_size=world_size)
    recfx.draw(Model(), tmp_path / "model.html", npu_topology(8), world_size=8)
    assert recfx.cost(Model(), npu_topology(8), world_size=8).world_size == 8
