"""The report of a sharded model shows the price of its plan and the runner-up, as that of the plan itself does."""

from __future__ import annotations

import copy
import html
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.replacement.conversion_record import conversion_of
from recfx.versions.differences import make_topology
from tests.builders.collections import table
from tests.sharding.ranks import ranks

KEYS = [f"f{number}" for number in range(4)]
TABLES = [table(f"t{number}", [key], rows=50) for number, key in enumerate(KEYS)]
BATCH = KeyedJaggedTensor(KEYS, torch.arange(8), lengths=torch.ones(8).int())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(TABLES)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled


def prices(report: recfx.Report) -> list[str]:
    return [reason.message for reason in report.reasons if reason.code == "plan_price"]


def made_plan(world_size: int) -> ShardingPlan:
    return recfx.plan(Model(), make_topology(world_size, "cpu"))


WAYS: dict[str, Callable[[ShardingEnv, ShardingPlan], nn.Module]] = {
    "no_plan": lambda env, plan: recfx.convert(Model(), env=env),
    "whole_graph": lambda env, plan: recfx.convert(Model(), (BATCH,), env=env, whole_graph=True),
    "given_plan": lambda env, plan: recfx.convert(Model(), plan=plan, env=env),
    "model_parallel": lambda env, plan: DistributedModelParallel(
        recfx.convert(Model()), env, plan=plan, sharders=recfx.sharders()
    ),
}


def reported(rank: int, world_size: int, way: str) -> dict[str, Any]:
    plan = made_plan(world_size)
    sharded = WAYS[way](ShardingEnv.from_process_group(dist.group.WORLD), plan)
    report = recfx.explain(sharded)
    shown = {
        "plan": prices(recfx.explain(Model(), plan=plan)),
        "reasons": prices(report),
        "json": [item["message"] for item in json.loads(report.to_json())["reasons"] if item["code"] == "plan_price"],
        "text": " ".join(str(report).split()),
        "html": html.unescape(report.to_html()),
        "ok": report.ok,
    }
    if way != "model_parallel":  # TorchRec cannot copy it
        shown["copied"] = prices(recfx.explain(copy.deepcopy(sharded)))
    record = conversion_of(sharded)
    assert pickle.loads(pickle.dumps(record)) == record
    return shown


@pytest.mark.parametrize("way", WAYS)
def test_equals_what_the_report_of_the_plan_says(way: str) -> None:
    for shown in ranks(2).run(reported, way):
        (expected,) = shown["plan"]
        assert expected.startswith("the plan is the cheapest of ")
        assert "; the runner-up (" in expected
        assert shown["reasons"] == shown["json"] == [expected]
        assert shown.get("copied", [expected]) == [expected]
        assert expected in shown["text"]
        assert expected in shown["html"]
        assert shown["ok"]


def _leave_out(tables: Any) -> None:
    del tables["t0"]


def _edit(tables: Any) -> None:
    tables["t0"].compute_kernel = "key_value"


@pytest.mark.parametrize("change", [_leave_out, _edit])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_copies_of_a_plan_know_whether_they_were_changed(copied: Callable[[Any], Any], change: Any) -> None:
    plan: Any = made_plan(2)
    again = copied(plan)
    assert again.is_as_priced
    change(again.plan["ebc"])
    assert not again.is_as_priced
    assert plan.is_as_priced
