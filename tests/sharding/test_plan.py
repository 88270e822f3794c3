"""Every refusal of a plan: its reason code, the collection that it is about, and a model that is as it was.

In a fake process group: what is refused is refused before anything is communicated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    CacheAlgorithm,
    MultiPassPrefetchConfig,
)
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
from torchrec.modules.embedding_configs import DataType

import recfx
from recfx.collections.sharding.plan import read_plan
from recfx.collections.sharding.shard import shard_collection
from recfx.ir.shards import ShardedTable
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder
from tests.builders.optimizers import attach
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


REFUSED: dict[str, tuple[Change, str, str]] = {
    "missing_table": (lambda plan: plan.pop("a") and None, "plan_missing_table", "'a'"),
    "unknown_table": (
        lambda plan: plan.update(c=plan["a"]),
        "plan_unknown_table",
        "'c', which the collection does not have",
    ),
    "renamed_table": (
        lambda plan: plan.update(c=plan.pop("a")),
        "plan_unknown_table",
        "'c' and lacks 'a': was it renamed?",
    ),
    "unknown_type": (setting(sharding_type="diagonal"), "unsupported_sharding_type", "'diagonal'"),
    "uvm": (setting(compute_kernel="fused_uvm"), "unsupported_compute_kernel", "'fused_uvm'"),
    "uvm_caching": (setting(compute_kernel="fused_uvm_caching"), "unsupported_compute_kernel", "fused_uvm_caching"),
    "key_value": (setting(compute_kernel="key_value"), "unsupported_compute_kernel", "'key_value'"),
    "ssd_virtual": (setting(compute_kernel="ssd_virtual_table"), "unsupported_compute_kernel", "ssd_virtual_table"),
    "quantized": (setting(compute_kernel="quant"), "unsupported_compute_kernel", "'quant'"),
    "stochastic_rounding": (setting(stochastic_rounding=True), "unsupported_plan_option", "sets stochastic_rounding="),
    "output_dtype": (setting(output_dtype=DataType.FP16), "unsupported_plan_option", "sets output_dtype="),
    "key_value_params": (setting(key_value_params=object()), "unsupported_plan_option", "sets key_value_params="),
    "bounds_check": (
        setting(bounds_check_mode=BoundsCheckMode.NONE),
        "unsupported_plan_option",
        "sets bounds_check_mode=",
    ),
    **{
        f"cache_{name}": (
            setting(cache_params=CacheParams(**{name: value})),
            "unsupported_plan_option",
            f"sets cache_params.{name}=",
        )
        for name, value in {
            "algorithm": CacheAlgorithm.LFU,
            "load_factor": 0.5,
            "reserved_memory": 1.0,
            "precision": DataType.FP16,
            "prefetch_pipeline": True,
            "multipass_prefetch_config": MultiPassPrefetchConfig(),
        }.items()
    },
    "rank_too_high": (place("table_wise", (0, 0, 16, 8, "rank:4/cpu")), "plan_rank", "rank 4, but ranks are 0 to 3"),
    "no_rank": (place("table_wise", (0, 0, 16, 8, "cpu")), "plan_invalid", "names no rank"),
    "no_spec": (setting(sharding_spec=None), "plan_invalid", "EnumerableShardingSpec"),
    "too_many_rows": (place("table_wise", (0, 0, 17, 8, "rank:0/cpu")), "plan_shape_mismatch", "17 rows"),
    "too_few_rows": (
        place("row_wise", (0, 0, 8, 8, "rank:0/cpu"), (8, 0, 4, 8, "rank:1/cpu")),
        "plan_shape_mismatch",
        "12 rows, but the table has 16",
    ),
    "too_few_columns": (place("table_wise", (0, 0, 16, 4, "rank:0/cpu")), "plan_shape_mismatch", "4 columns"),
    "hole_in_rows": (
        place("row_wise", (0, 0, 8, 8, "rank:0/cpu"), (9, 0, 7, 8, "rank:1/cpu")),
        "plan_invalid",
        "rows 8 to 9",
    ),
    "hole_in_columns": (
        place("column_wise", (0, 0, 16, 2, "rank:0/cpu"), (0, 4, 16, 4, "rank:1/cpu")),
        "plan_invalid",
        "columns 2 to 4",
    ),
    "table_wise_in_two": (
        place("table_wise", (0, 0, 8, 8, "rank:0/cpu"), (8, 0, 8, 8, "rank:1/cpu")),
        "plan_invalid",
        "cuts rows",
    ),
    "two_pieces_on_a_rank": (
        place("row_wise", (0, 0, 8, 8, "rank:0/cpu"), (8, 0, 8, 8, "rank:0/cpu")),
        "plan_invalid",
        "on one rank",
    ),
    "host_out_of_order": (
        place("table_row_wise", (0, 0, 8, 8, "rank:1/cpu"), (8, 0, 8, 8, "rank:0/cpu")),
        "plan_invalid",
        "one host",
    ),
    "host_across_hosts": (
        place("table_row_wise", (0, 0, 8, 8, "rank:1/cpu"), (8, 0, 8, 8, "rank:2/cpu")),
        "plan_invalid",
        "one host",
    ),
}


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("case", sorted(REFUSED))
def test_a_plan_is_refused_before_anything_is_sharded(case: str) -> None:
    change, reason, says = REFUSED[case]
    model = Model()
    plan = right_plan(model)
    change(plan)
    check_refused(model, ShardingPlan({"part.ebc": EmbeddingModuleShardingPlan(plan)}), reason, "part.ebc", says)


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


def check_refused(model: nn.Module, plan: Any, reason: str, path: str, says: str, **options: Any) -> None:
    """``model``, converted or not, with ``inplace`` or not, is as it was after the error."""
    for subject in (model, recfx.convert(model)):
        for inplace in (False, True):
            before = copy.deepcopy(subject.state_dict())
            modules = dict(subject.named_modules())
            with refused(reason, path) as caught:
                recfx.convert(subject, plan=plan, inplace=inplace, **options)
            assert says in str(caught.value)
            assert caught.value.what_to_do
            torch.testing.assert_close(subject.state_dict(), before, rtol=0, atol=0)
            after = dict(subject.named_modules())
            assert after.keys() == modules.keys()
            assert all(after[name] is module for name, module in modules.items())


@pytest.mark.usefixtures("four_ranks")
def test_collections_that_the_plan_does_not_fit() -> None:
    model = Model()
    tables = EmbeddingModuleShardingPlan(right_plan(model))
    check_refused(model, ShardingPlan({}), "plan_missing_collection", "part.ebc", "does not name this collection")
    wrong = ShardingPlan({"part.ebc": tables, "part.other": tables})
    check_refused(model, wrong, "plan_unknown_collection", "part.other", "['part.ebc']")


@pytest.mark.usefixtures("four_ranks")
def test_the_first_collection_is_not_sharded_alone() -> None:
    model = nn.ModuleList([Model(), Model()])
    tables = EmbeddingModuleShardingPlan(right_plan(model[0]))
    check_refused(
        model,
        ShardingPlan({"0.part.ebc": tables}),
        "plan_missing_collection",
        "1.part.ebc",
        "does not name this collection",
    )


@pytest.mark.usefixtures("four_ranks")
def test_arguments_of_another_type() -> None:
    model = Model()
    right = ShardingPlan({"part.ebc": EmbeddingModuleShardingPlan(right_plan(model))})
    check_refused(model, right.plan, "invalid_argument", "", "plan is a dict")
    check_refused(model, "row_wise", "invalid_argument", "", "a str")
    check_refused(model, right, "invalid_argument", "", "ShardingEnv", env=dist.group.WORLD)
    check_refused(model, ShardingPlan({"part.ebc": {"a": "row_wise", "b": 1}}), "invalid_argument", "part.ebc", "'a'")
    check_refused(model, ShardingPlan({"part.ebc": "row_wise"}), "invalid_argument", "part.ebc", "a str")


def test_without_a_process_group() -> None:
    model = Model()
    right = ShardingPlan({"part.ebc": EmbeddingModuleShardingPlan(right_plan(model))})
    check_refused(model, right, "no_process_group", "", "init_process_group")
    alone = ShardingEnv.from_local(world_size=WORLD, rank=0)
    check_refused(model, right, "no_process_group", "", "from_process_group", env=alone)


@pytest.mark.usefixtures("four_ranks")
def test_a_plan_for_the_rows_that_the_table_had_before() -> None:
    model = Model()
    plan = ShardingPlan({"part.ebc": EmbeddingModuleShardingPlan(right_plan(model, stock.table_wise(rank=0)))})
    with refused("plan_shape_mismatch", "part.ebc") as caught:
        recfx.convert(model, hashing=recfx.HashConfig(rows=20, dense_rows=20), plan=plan)
    assert "hashing may have given the table more rows" in caught.value.what_to_do
    assert model.part["ebc"].embedding_bags["a"].weight.shape == (16, 8)


@pytest.mark.usefixtures("four_ranks")
def test_an_optimizer_in_backward_that_has_no_fused_form() -> None:
    model = Model()
    attach(model, torch.optim.RMSprop)
    plan = ShardingPlan({"part.ebc": EmbeddingModuleShardingPlan(right_plan(Model()))})
    with pytest.raises(recfx.ConversionError) as caught:
        recfx.convert(model, plan=plan)
    assert caught.value.module_path == "part.ebc"
    assert "RMSprop" in str(caught.value)
    assert isinstance(model.part["ebc"], EmbeddingBagCollection)


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
    assert table.row_borders() == list(table.planned_borders) == [0, 4, 8, 12, 16]


def test_cuts_of_an_indexed_table_are_at_bucket_borders() -> None:
    converted = recfx.convert(Model(), hashing=recfx.HashConfig(dense_rows=0, buckets=3)).part["ebc"]
    sharding = read_plan(converted.tables, right_plan(Model()), 0, WORLD, "ebc")
    table = sharding.named("a")
    assert table.row_borders() == [0, 0, 5, 10, 16]
    assert table.planned_borders == (0, 4, 8, 12, 16)
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


def test_one_piece_of_rows_is_not_cut() -> None:
    (shard,) = table_read(pieces_on("row_wise", (0, 0, 16, 8, 0)), 1).shards
    assert (shard.piece, shard.rows, shard.columns) == (-1, (0, 16), (0, 8))


@pytest.mark.parametrize("hashing", [None, RAW], ids=["static", "hashed"])
def test_shards_of_types_that_leave_rows_uncut(hashing: recfx.HashConfig | None) -> None:
    columns = table_read(pieces_on("column_wise", (0, 4, 16, 4, 1), (0, 0, 16, 4, 3)), WORLD, hashing)
    assert [(shard.rank, shard.rows, shard.columns, shard.piece) for shard in columns.shards] == [
        (3, (0, 16), (0, 4), -1),
        (1, (0, 16), (4, 8), -1),
    ]
    by_rank = table_read(ParameterSharding("table_wise", "fused", [2]), WORLD, hashing)
    assert [(shard.rank, shard.rows, shard.columns) for shard in by_rank.shards] == [(2, (0, 16), (0, 8))]
    replicas = table_read(ParameterSharding("data_parallel", "dense", []), WORLD, hashing)
    assert [(shard.rank, shard.rows, shard.columns) for shard in replicas.shards] == [
        (rank, (0, 16), (0, 8)) for rank in range(WORLD)
    ]
    assert (columns.way_back.name, by_rank.way_back.name) == ("table_wise", "table_wise")
    assert (replicas.way_back.name, replicas.is_replicated) == ("data_parallel", True)


@pytest.mark.parametrize(
    ("parameter", "reason", "says"),
    [
        (ParameterSharding("table_wise", "fused", [4]), "plan_rank", "on rank 4, but ranks are 0 to 3"),
        (ParameterSharding("data_parallel", "dense", [*range(8)]), "plan_rank", "on rank 4, but ranks are 0 to 3"),
        (ParameterSharding("data_parallel", "dense", [0, 1]), "plan_rank", "on ranks [0, 1], but there are 4 ranks"),
        (ParameterSharding("table_wise", "fused", [0, 1]), "plan_invalid", "EnumerableShardingSpec"),
        (ParameterSharding("table_wise", "fused", []), "plan_invalid", "EnumerableShardingSpec"),
        (ParameterSharding("table_wise", "fused", None), "plan_invalid", "EnumerableShardingSpec"),
        (pieces_on("table_wise", (8, 0, 16, 8, 0)), "plan_invalid", "cuts rows"),
        (pieces_on("column_wise", (0, 0, 16, 4, 0), (4, 4, 16, 4, 1)), "plan_invalid", "cuts rows"),
        (
            ParameterSharding("row_wise", "fused", [], EnumerableShardingSpec([ShardMetadata([0, 0], [16, 8])])),
            "plan_invalid",
            "None, which names no rank",
        ),
    ],
)
def test_plans_of_hashed_tables_are_refused_for_what_is_left_of_them(
    parameter: ParameterSharding, reason: str, says: str
) -> None:
    """Their rows are cut anew, but ranks and columns are the plan's."""
    with refused(reason) as caught:
        table_read(parameter, WORLD, RAW)
    assert says in str(caught.value)
    assert "table 'a'" in str(caught.value)


def test_tables_without_an_index_are_cut_where_the_plan_says_even_if_they_have_a_config() -> None:
    parts = (0, 0, 10, 8, 0), (10, 0, 6, 8, 1)
    for hashing in (None, recfx.HashConfig()):
        assert table_read(pieces_on("row_wise", *parts), 2, hashing).row_borders() == [0, 10, 16]
    assert table_read(pieces_on("row_wise", *parts), 2, RAW).row_borders() == [0, 8, 16]


def test_ranks_go_through_the_ways_back_in_one_order() -> None:
    converted = recfx.convert(Model()).part["ebc"]
    host = pieces_on("table_row_wise", (0, 0, 8, 8, 0), (8, 0, 8, 8, 1))
    orders = []
    for a, b in (
        (ParameterSharding("data_parallel", "dense", []), host),
        (host, pieces_on("row_wise", *((4 * rank, 0, 4, 8, rank) for rank in range(4)))),
        (
            pieces_on("row_wise", *((4 * rank, 0, 4, 8, rank) for rank in range(4))),
            pieces_on("table_wise", (0, 0, 16, 8, 1)),
        ),
    ):
        ways = read_plan(converted.tables, {"a": a, "b": b}, 0, WORLD).ways_back
        orders.append([(way.place, way.name, way.wording) for way in ways])
    whole, by_rows = (0, "table_wise", "all-to-all"), (1, "row_wise", "summed over ranks")
    by_hosts = (2, "table_row_wise", "summed on a host, then all-to-all")
    assert orders == [[by_hosts, (3, "data_parallel", "stay")], [by_rows, by_hosts], [whole, by_rows]]


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(("path", "named"), [("", "part.ebc"), ("elsewhere", "elsewhere")])
def test_a_collection_that_is_sharded_by_itself_has_its_own_path_in_messages(path: str, named: str) -> None:
    converted = recfx.convert(Model()).part["ebc"]
    with refused("plan_missing_table", named):
        shard_collection(converted, {}, ShardingEnv.from_process_group(dist.group.WORLD), path=path)
