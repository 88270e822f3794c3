"""Graphs of any rank of any plan are made without process groups, and say what the graphs of real ranks say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import compile_graph, context_of
from recfx.collections.sharding.plan import read_plan
from recfx.collections.sharding.settings import optimizer_settings
from recfx.collections.sharding.shard import cut_tables
from recfx.ir import format_graph
from recfx.ir.context import CollectionContext
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.shards import CollectionSharding
from recfx.lowering.targets import TargetsHere
from recfx.passes import passes
from recfx.passes.base import run_passes
from recfx.runtime.dist_groups import DistGroups
from recfx.runtime.lower_graph import Runtime
from tests.models import ZOO
from tests.models.case import standard_collections
from tests.sharding.cases import build, plan_of, with_optimizer
from tests.sharding.typical_cases import CASES, TYPES, hashed_case, random_case

WORLD_SIZE = 4


def context(collection: UnshardedCollection, sharding: CollectionSharding | None = None) -> CollectionContext:
    """From the whole tables and the plan alone."""
    of = context_of(
        collection.collection,
        collection.tables,
        collection.is_weighted(),
        Runtime(collection.store),
        collection.source,
        need_indices=collection._need_indices,
    )
    return replace(of, sharding=sharding)


def texts(of: CollectionContext) -> list[str]:
    """The text of the graph after each pass."""
    texts_of_passes: list[str] = []

    def note(_: str, graph: OperatorGraph) -> None:
        texts_of_passes.append(format_graph(graph))

    run_passes(OperatorGraph.of(of, TargetsHere()), passes(), note)
    return texts_of_passes


HASHINGS = (recfx.HashConfig(), recfx.HashConfig(dense_rows=0), None)


@pytest.mark.parametrize(("number", "case"), [pytest.param(*row, id=row[1].name) for row in enumerate(ZOO)])
def test_unsharded(number: int, case: Any) -> None:
    config = HASHINGS[number % 3]
    with case.around():
        collections = standard_collections(case.model())
    assert collections
    for standard in collections:
        converted = recfx.convert(standard, hashing=config, on_unsupported="keep")
        if isinstance(converted, UnshardedCollection):
            found_texts = texts(context(converted))
            assert found_texts == [record.text for record in converted.pass_records[: len(found_texts)]]
            assert found_texts[-1] == format_graph(converted.graph_module)


PLANS = {
    **CASES,
    **{f"{kind}_hashed": hashed_case(kind, "lru") for kind in TYPES},
    **{f"random {number}": random_case(number, WORLD_SIZE) for number in range(12)},
}


@pytest.mark.parametrize("name", PLANS)
def test_sharded(name: str) -> None:
    case = replace(PLANS[name], local_size=2)
    converted = with_optimizer(case, recfx.convert(build(case)[0], hashing=case.hashing, dedup=case.dedup))
    assert isinstance(converted, UnshardedCollection)
    converted.fused_optimizers()  # those that were attached
    plan = plan_of(case, converted, WORLD_SIZE)
    for rank in range(WORLD_SIZE):
        sharding = read_plan(converted.tables, plan, rank, WORLD_SIZE)
        planned = texts(context(converted, sharding))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
        try:
            groups = DistGroups.of(ShardingEnv.from_process_group(dist.group.WORLD), sharding.local_size)
            settings = optimizer_settings(converted, sharding, None, dense_as_torchrec=False)
            store = cut_tables(converted, sharding, groups.pooled, None, settings.fused)
            runtime = Runtime(store, groups)
            real = context_of("", converted.tables, case.is_weighted, runtime, None, sharding)
            graph_module = compile_graph(OperatorGraph.of(real, TargetsHere()), runtime, "auto")
        finally:
            dist.destroy_process_group()
        # Before ids are sent, the graph is that of the whole tables, of which a rank does not know all facts.
        assert planned[1:] == [record.text for record in graph_module.meta["recfx_passes"][1:]]
        assert planned[-1] == format_graph(graph_module)
