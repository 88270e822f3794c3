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
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import sharding_plan as stock
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import DataType

import recfx
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder
from recfx.sharding.plan import read_plan
from tests.builders.optimizers import attach

WORLD = 4
RAW = recfx.HashConfig(dense_rows=0, buckets=4)
Change = Callable[[dict[str, ParameterSharding]], None]


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


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
    "unknown_table": (lambda plan: plan.update(c=plan["a"]), "plan_unknown_table", "'c'"),
    "unknown_type": (setting(sharding_type="diagonal"), "unsupported_sharding_type", "'diagonal'"),
    "uvm": (setting(compute_kernel="fused_uvm"), "unsupported_compute_kernel", "'fused_uvm'"),
    "uvm_caching": (setting(compute_kernel="fused_uvm_caching"), "unsupported_compute_kernel", "fused_uvm_caching"),
    "key_value": (setting(compute_kernel="key_value"), "unsupported_compute_kernel", "'key_value'"),
    "ssd_virtual": (setting(compute_kernel="ssd_virtual_table"), "unsupported_compute_kernel", "ssd_virtual_table"),
    "quantized": (setting(compute_kernel="quant"), "unsupported_compute_kernel", "'quant'"),
    "stochastic_rounding": (setting(stochastic_rounding=True), "unsupported_plan_option", "stochastic_rounding"),
    "output_dtype": (setting(output_dtype=DataType.FP16), "unsupported_plan_option", "output_dtype"),
    "key_value_params": (setting(key_value_params=object()), "unsupported_plan_option", "key_value_params"),
    "rank_too_high": (place("table_wise", (0, 0, 16, 8, "rank:4/cpu")), "plan_rank", "rank 4, but there are 4"),
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


def check_refused(model: nn.Module, plan: Any, reason: str, path: str, says: str, **options: Any) -> None:
    """``model``, converted or not, with ``inplace`` or not, is as it was after the error."""
    for subject in (model, recfx.convert(model)):
        for inplace in (False, True):
            before = copy.deepcopy(subject.state_dict())
            modules = dict(subject.named_modules())
            with pytest.raises(recfx.ConversionError) as caught:
                recfx.convert(subject, plan=plan, inplace=inplace, **options)
            assert (caught.value.reason, caught.value.module_path) == (reason, path)
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
    check_refused(model, right.plan, "invalid_argument", "", "ShardingPlan")
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
    with pytest.raises(recfx.ConversionError) as caught:
        recfx.convert(model, hashing=recfx.HashConfig(rows=20, dense_rows=20), plan=plan)
    assert (caught.value.reason, caught.value.module_path) == ("plan_shape_mismatch", "part.ebc")
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
    with pytest.raises(recfx.ConversionError) as caught:
        read_plan(converted.tables, plan, 0, 8, "ebc")
    assert (caught.value.reason, caught.value.module_path) == ("plan_invalid", "ebc")
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
