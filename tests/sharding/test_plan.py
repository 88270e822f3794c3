"""Every refusal of a plan: its reason code, the collection that it is about, and a model that is as it was.

In a fake process group: what is refused is refused before anything is communicated.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import sharding_plan as stock
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)

import recfx
from recfx.collections.sharding.plan import read_plan
from recfx.ir.shards import ShardedTable
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder
from tests.support.fake_group import fake_group
from tests.support.refusals import refused

WORLD = 4
RAW = recfx.HashConfig(dense_rows=0, buckets=4)
Change = Callable[[dict[str, ParameterSharding]], None]


@pytest.fixture
def four_ranks() -> Iterator[None]:
    with fake_group(0, WORLD):
        yield


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.ModuleDict({"ebc": EmbeddingBagCollection([config("a"), config("b")])})

    def forward(self, features: Any) -> Any:
        return self.part["ebc"](features).values()


def config(name: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=16, embedding_dim=8, feature_names=[f"f_{name}"])


def right_plan(model: nn.Module, a: Any = None) -> dict[str, ParameterSharding]:
    makers = {"a": a or stock.row_wise(), "b": stock.table_wise(rank=1)}
    return dict(
        stock.construct_module_sharding_plan(
            recfx.convert(model).part["ebc"],
            makers,
            sharder=HashEmbeddingBagCollectionSharder(),
            local_size=2,
            world_size=WORLD,
            device_type="cpu",
        )
    )


def shards(*parts: tuple[int, int, int, int, str]) -> EnumerableShardingSpec:
    """Each: first row, first column, rows, columns, placement."""
    return EnumerableShardingSpec(
        [ShardMetadata([row, column], [rows, dim], placement) for row, column, rows, dim, placement in parts]
    )


def place(kind: str, *parts: tuple[int, int, int, int, str]) -> Change:
    def change(plan: dict[str, ParameterSharding]) -> None:
        ranks = list(range(len(parts)))
        plan["a"] = ParameterSharding(kind, "fused", ranks, shards(*parts))

    return change


def setting(**fields: Any) -> Change:
    def change(plan: dict[str, ParameterSharding]) -> None:
        for name, value in fields.items():
            setattr(plan["a"], name, value)

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "missing_table": (lambda plan: plan.pop("a") and None, "plan_missing_table"),
    "unknown_table": (lambda plan: plan.update(c=plan["a"]), "plan_unknown_table"),
    "renamed_table": (lambda plan: plan.update(c=plan.pop("a")), "plan_unknown_table"),
    "unknown_type": (setting(sharding_type="diagonal"), "unsupported_sharding_type"),
    "uvm": (setting(compute_kernel="fused_uvm"), "unsupported_compute_kernel"),
    "quantized": (setting(compute_kernel="quant"), "unsupported_compute_kernel"),
    "stochastic_rounding": (setting(stochastic_rounding=True), "unsupported_plan_option"),
    "bounds_check": (setting(bounds_check_mode=BoundsCheckMode.NONE), "unsupported_plan_option"),
    "cache_algorithm": (setting(cache_params=CacheParams(algorithm=CacheAlgorithm.LFU)), "unsupported_plan_option"),
    "cache_load_factor": (setting(cache_params=CacheParams(load_factor=0.5)), "unsupported_plan_option"),
    "rank_too_high": (place("table_wise", (0, 0, 16, 8, "rank:4/cpu")), "plan_rank"),
    "no_rank": (place("table_wise", (0, 0, 16, 8, "cpu")), "plan_invalid"),
    "no_spec": (setting(sharding_spec=None), "plan_invalid"),
    "too_many_rows": (place("table_wise", (0, 0, 17, 8, "rank:0/cpu")), "plan_shape_mismatch"),
    "too_few_rows": (place("row_wise", (0, 0, 8, 8, "rank:0/cpu"), (8, 0, 4, 8, "rank:1/cpu")), "plan_shape_mismatch"),
    "too_few_columns": (place("table_wise", (0, 0, 16, 4, "rank:0/cpu")), "plan_shape_mismatch"),
    "hole_in_rows": (place("row_wise", (0, 0, 8, 8, "rank:0/cpu"), (9, 0, 7, 8, "rank:1/cpu")), "plan_invalid"),
    "hole_in_columns": (place("column_wise", (0, 0, 16, 2, "rank:0/cpu"), (0, 4, 16, 4, "rank:1/cpu")), "plan_invalid"),
    "table_wise_in_two": (place("table_wise", (0, 0, 8, 8, "rank:0/cpu"), (8, 0, 8, 8, "rank:1/cpu")), "plan_invalid"),
    "two_pieces_on_a_rank": (place("row_wise", (0, 0, 8, 8, "rank:0/cpu"), (8, 0, 8, 8, "rank:0/cpu")), "plan_invalid"),
    "host_out_of_order": (
        place("table_row_wise", (0, 0, 8, 8, "rank:1/cpu"), (8, 0, 8, 8, "rank:0/cpu")), "plan_invalid"
    ),
    "host_across_hosts": (
        place("table_row_wise", (0, 0, 8, 8, "rank:1/cpu"), (8, 0, 8, 8, "rank:2/cpu")), "plan_invalid"
    ),
}  # fmt: skip


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("case", sorted(REFUSED))
def test_a_plan_is_refused_before_anything_is_sharded(case: str) -> None:
    change, reason = REFUSED[case]
    model = Model()
    plan = right_plan(model)
    change(plan)
    check_refused(model, ShardingPlan({"part.ebc": EmbeddingModuleShardingPlan(plan)}), reason, "part.ebc")


@pytest.mark.usefixtures("four_ranks")
def test_options_of_a_plan_that_change_nothing() -> None:
    """Statistics of a cache are only for planners."""
    options = [
        CacheParams(), CacheParams(algorithm=CacheAlgorithm.LRU, load_factor=0.2, prefetch_pipeline=False),
        CacheParams(stats=object()),
    ]  # fmt: skip
    for cache in options:
        plan = right_plan(Model())
        setting(cache_params=cache, enforce_hbm=True, bounds_check_mode=BoundsCheckMode.FATAL)(plan)
        recfx.convert(Model(), plan=ShardingPlan({"part.ebc": EmbeddingModuleShardingPlan(plan)}))


def check_refused(model: nn.Module, plan: Any, reason: str, path: str, **options: Any) -> None:
    """``model``, converted or not, with ``inplace`` or not, is as it was after the error."""
    for subject in (model, recfx.convert(model)):
        for inplace in (False, True):
            before = copy.deepcopy(subject.state_dict())
            modules = dict(subject.named_modules())
            with refused(reason, path) as caught:
                recfx.convert(subject, plan=plan, inplace=inplace, **options)
            assert caught.value.what_to_do
            torch.testing.assert_close(subject.state_dict(), before, rtol=0, atol=0)
            after = dict(subject.named_modules())
            assert after.keys() == modules.keys()
            assert all(after[name] is module for name, module in modules.items())


@pytest.mark.usefixtures("four_ranks")
def test_collections_that_the_plan_does_not_fit() -> None:
    model = Model()
    tables = EmbeddingModuleShardingPlan(right_plan(model))
    check_refused(model, ShardingPlan({}), "plan_missing_collection", "part.ebc")
    wrong = ShardingPlan({"part.ebc": tables, "part.other": tables})
    check_refused(model, wrong, "plan_unknown_collection", "part.other")


@pytest.mark.usefixtures("four_ranks")
def test_arguments_of_another_type() -> None:
    model = Model()
    right = ShardingPlan({"part.ebc": EmbeddingModuleShardingPlan(right_plan(model))})
    check_refused(model, right.plan, "invalid_argument", "")
    check_refused(model, "row_wise", "invalid_argument", "")
    check_refused(model, right, "invalid_argument", "", env=dist.group.WORLD)
    check_refused(model, ShardingPlan({"part.ebc": {"a": "row_wise", "b": 1}}), "invalid_argument", "part.ebc")
    check_refused(model, ShardingPlan({"part.ebc": "row_wise"}), "invalid_argument", "part.ebc")


def test_without_a_process_group() -> None:
    model = Model()
    right = ShardingPlan({"part.ebc": EmbeddingModuleShardingPlan(right_plan(model))})
    check_refused(model, right, "no_process_group", "")
    alone = ShardingEnv.from_local(world_size=WORLD, rank=0)
    check_refused(model, right, "no_process_group", "", env=alone)


@pytest.mark.usefixtures("four_ranks")
def test_a_plan_for_the_rows_that_the_table_had_before() -> None:
    model = Model()
    plan = ShardingPlan({"part.ebc": EmbeddingModuleShardingPlan(right_plan(model, stock.table_wise(rank=0)))})
    with refused("plan_shape_mismatch", "part.ebc") as caught:
        recfx.convert(model, hashing=recfx.HashConfig(rows=20, dense_rows=20), plan=plan)
    assert "hashing may have given the table more rows" in caught.value.what_to_do
    assert model.part["ebc"].embedding_bags["a"].weight.shape == (16, 8)


def test_hosts_of_different_sizes() -> None:
    converted = recfx.convert(Model()).part["ebc"]
    parts = [(4 * piece, 0, 4, 8, f"rank:{piece}/cpu") for piece in range(4)]
    halves = [(8 * piece, 0, 8, 8, f"rank:{4 + piece}/cpu") for piece in range(2)]
    plan = {
        name: ParameterSharding("table_row_wise", "fused", [], shards(*pieces))
        for name, pieces in (("a", parts), ("b", halves))
    }
    with refused("plan_invalid", "ebc") as caught:
        read_plan(converted.tables, plan, 0, 8, "ebc")
    assert "[2, 4] ranks" in str(caught.value)


def test_the_order_in_which_a_plan_lists_its_pieces_does_not_matter() -> None:
    converted = recfx.convert(Model()).part["ebc"]
    pieces = [(16 - 4 * (rank + 1), 0, 4, 8, f"rank:{rank}/cpu") for rank in range(WORLD)]
    plan = {**right_plan(Model()), "a": ParameterSharding("row_wise", "fused", [0, 1, 2, 3], shards(*pieces))}
    table = read_plan(converted.tables, plan, 0, WORLD).named("a")
    assert [(shard.rows, shard.rank) for shard in table.shards] == [
        ((0, 4), 3),
        ((4, 8), 2),
        ((8, 12), 1),
        ((12, 16), 0),
    ]
    assert table.row_borders() == [0, 4, 8, 12, 16]


def test_cuts_of_an_indexed_table_are_at_bucket_borders() -> None:
    converted = recfx.convert(Model(), hashing=recfx.HashConfig(dense_rows=0, buckets=3)).part["ebc"]
    sharding = read_plan(converted.tables, right_plan(Model()), 0, WORLD, "ebc")
    table = sharding.named("a")
    assert table.row_borders() == [0, 0, 5, 10, 16]
    assert [shard.is_empty for shard in table.shards] == [True, False, False, False]


def table_read(parameter: ParameterSharding, world_size: int, hashing: recfx.HashConfig | None = None) -> ShardedTable:
    """Table a under this plan, seen from rank 0."""
    converted = recfx.convert(Model(), hashing=hashing).part["ebc"]
    plan = {"a": parameter, "b": ParameterSharding("table_wise", "fused", [0])}
    return read_plan(converted.tables, plan, 0, world_size, "ebc").named("a")


def pieces_on(kind: str, *parts: tuple[int, int, int, int, int]) -> ParameterSharding:
    """Each: first row, first column, rows, columns, rank."""
    return ParameterSharding(kind, "fused", [], shards(*((*part[:4], f"rank:{part[4]}/cpu") for part in parts)))


@pytest.mark.parametrize(
    ("parts", "world_size", "way", "pieces"),
    [
        ([(0, 0, 16, 8, 3)], 4, "table_wise", [-1]),
        ([(0, 0, 8, 8, 2), (8, 0, 8, 8, 3)], 4, "table_row_wise", [0, 1]),
        ([(0, 0, 8, 8, 0), (8, 0, 8, 8, 1)], 2, "row_wise", [0, 1]),
    ],
    ids=["one rank of a host", "a host", "all ranks"],
)
def test_rows_within_a_host_come_back_by_the_shortest_way(
    parts: list[tuple[int, int, int, int, int]], world_size: int, way: str, pieces: list[int]
) -> None:
    for kind in ("table_row_wise", "grid_shard"):
        table = table_read(pieces_on(kind, *parts), world_size)
        assert (table.way_back.name, table.way_back.local_size) == (way, 2 if way == "table_row_wise" else 1)
        assert [shard.piece for shard in table.shards] == pieces
        assert [shard.rank for shard in table.shards] == [part[4] for part in parts]


@pytest.mark.parametrize(
    ("parts", "world_size"),
    [
        ([(0, 0, 8, 8, 0), (8, 0, 8, 8, 1)], 5),  # hosts of two among five ranks
        ([(0, 0, 8, 4, 0), (8, 0, 8, 4, 1), (0, 4, 16, 4, 2)], 4),  # hosts of two ranks and of one
        ([(0, 0, 8, 8, 0), (8, 0, 8, 8, 2)], 4),
        ([(0, 0, 8, 4, 0), (8, 0, 8, 4, 1), (0, 4, 8, 4, 3), (8, 4, 8, 4, 2)], 4),
        ([(0, 0, 8, 4, 0), (8, 0, 8, 4, 1), (0, 4, 8, 4, 1), (8, 4, 8, 4, 2)], 4),
    ],
)
def test_rows_that_are_not_on_the_ranks_of_one_host(
    parts: list[tuple[int, int, int, int, int]], world_size: int
) -> None:
    with refused("plan_invalid", match="the ranks of one host, in order"):
        table_read(pieces_on("grid_shard", *parts), world_size)


@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        (ParameterSharding("table_wise", "fused", [4]), "plan_rank"),
        (ParameterSharding("data_parallel", "dense", [*range(8)]), "plan_rank"),
        (ParameterSharding("data_parallel", "dense", [0, 1]), "plan_rank"),
        (ParameterSharding("table_wise", "fused", [0, 1]), "plan_invalid"),
        (ParameterSharding("table_wise", "fused", None), "plan_invalid"),
        (pieces_on("table_wise", (8, 0, 16, 8, 0)), "plan_invalid"),
        (pieces_on("column_wise", (0, 0, 16, 4, 0), (4, 4, 16, 4, 1)), "plan_invalid"),
        (
            ParameterSharding("row_wise", "fused", [], EnumerableShardingSpec([ShardMetadata([0, 0], [16, 8])])),
            "plan_invalid",
        ),
    ],
)
def test_plans_of_hashed_tables_are_refused_for_what_is_left_of_them(parameter: ParameterSharding, reason: str) -> None:
    """Their rows are cut anew, but ranks and columns are the plan's."""
    with refused(reason, match="table 'a'"):
        table_read(parameter, WORLD, RAW)
