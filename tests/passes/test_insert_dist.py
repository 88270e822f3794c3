"""insert_dist: the graph of one rank, as text. In a fake process group: nothing is communicated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec import EmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.ir import format_graph
from recfx.ir.meta import BATCH, WORLD, mean_length, node_meta
from recfx.nodes.dist_groups import DistGroups
from recfx.nodes.resources import Resources
from recfx.passes import passes, run_passes
from recfx.passes._nodes import nodes_of_kind
from recfx.sharding.plan import read_plan
from tests.sharding.cases import Case, Table, plan_of

WORLD_SIZE = 4


@pytest.fixture(autouse=True)
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def graph_of(
    tables: tuple[Table, ...], hashing: recfx.HashConfig | None = None, local_size: int = 0
) -> tuple[fx.GraphModule, list[str]]:
    """The graph of rank 1 after a pass, and what that pass declined."""
    case = Case(tables, hashing=hashing, local_size=local_size)
    standard = EmbeddingBagCollection(tables=[table.config() for table in tables])
    converted = recfx.convert(standard, hashing=hashing)
    assert isinstance(converted, recfx.HashEmbeddingBagCollection)
    sharding = read_plan(converted.tables, plan_of(case, converted, WORLD_SIZE), 1, WORLD_SIZE)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    groups = DistGroups.of(env, sharding.local_size)
    pipeline = passes("auto", sharding)
    names = [rewrite.name for rewrite in pipeline]
    graph_module = converted.unexpanded_graph(Resources(converted._store, groups))
    # Lookups of whole tables stand in for those of shards, which no pass up to insert_dist looks at.
    records = run_passes(graph_module, pipeline[: names.index("insert_dist") + 1])
    return graph_module, [declined.code for declined in records[-1].declined]


def test_types_that_travel_alike_share_the_way_back() -> None:
    graph_module, declined = graph_of(
        (
            Table("a", 8, 8, ("f0",), "SUM", ("table_wise", 1)),
            Table("b", 8, 8, ("f1",), "SUM", ("column_wise", 1, 2)),
            Table("c", 8, 8, ("f2",), "MEAN", ("row_wise",)),
            Table("d", 8, 8, ("f0",), "SUM", ("data_parallel",)),
        )
    )
    assert declined == []
    assert format_graph(graph_module) == (
        "features = input\n"
        "ebc_select_features = select_features(features)\n"
        "ebc_bucketize = bucketize(ebc_select_features)\n"
        "ebc_input_dist_start = input_dist_start(ebc_bucketize)\n"
        "ebc_ids_in_flight = ebc_input_dist_start[0]\n"
        "ebc_dist_context_in_flight = ebc_input_dist_start[1]\n"
        "ebc_input_dist_wait = input_dist_wait(ebc_ids_in_flight, ebc_dist_context_in_flight)\n"
        "ebc_ids = ebc_input_dist_wait[0]\n"
        "ebc_dist_context = ebc_input_dist_wait[1]\n"
        "ebc_lookup = lookup(ebc_ids) {tables=[a], pooling=SUM, dtype=float32}\n"
        "ebc_lookup_1 = lookup(ebc_ids) {tables=[b], pooling=SUM, dtype=float32}\n"
        "ebc_output_dist_start = output_dist_start(ebc_lookup, ebc_lookup_1, ebc_dist_context) {operation=all_to_all}\n"
        "ebc_lookup_2 = lookup(ebc_ids) {tables=[c], pooling=SUM, dtype=float32}\n"
        "ebc_output_dist_start_1 = output_dist_start(ebc_lookup_2, ebc_dist_context) {operation=reduce_scatter}\n"
        "ebc_lookup_3 = lookup(ebc_ids) {tables=[d], pooling=SUM, dtype=float32}\n"
        "ebc_output_dist_start_2 = output_dist_start(ebc_lookup_3, ebc_dist_context) {operation=own_batch}\n"
        "ebc_output_dist_wait = output_dist_wait(ebc_output_dist_start)\n"
        "ebc_output_dist_wait_1 = output_dist_wait(ebc_output_dist_start_1)\n"
        "ebc_mean_divide = mean_divide(ebc_output_dist_wait_1, ebc_select_features) {divided=[c]}\n"
        "ebc_output_dist_wait_2 = output_dist_wait(ebc_output_dist_start_2)\n"
        "ebc_keyed_tensor = keyed_tensor(ebc_output_dist_wait, ebc_mean_divide, ebc_output_dist_wait_2)\n"
        "return ebc_keyed_tensor"
    )


def test_a_rank_without_tables_takes_part_all_the_same() -> None:
    graph_module, _ = graph_of((Table("a", 8, 8, ("f0",), "SUM", ("table_wise", 3)),))
    assert format_graph(graph_module).splitlines()[2:] == [
        "ebc_input_dist_start = input_dist_start(ebc_select_features)",
        "ebc_ids_in_flight = ebc_input_dist_start[0]",
        "ebc_dist_context_in_flight = ebc_input_dist_start[1]",
        "ebc_input_dist_wait = input_dist_wait(ebc_ids_in_flight, ebc_dist_context_in_flight)",
        "ebc_dist_context = ebc_input_dist_wait[1]",
        "ebc_output_dist_start = output_dist_start(ebc_dist_context) {operation=all_to_all}",
        "ebc_output_dist_wait = output_dist_wait(ebc_output_dist_start)",
        "ebc_keyed_tensor = keyed_tensor(ebc_output_dist_wait)",
        "return ebc_keyed_tensor",
    ]


def test_rows_cut_inside_hosts_take_two_hops() -> None:
    graph_module, _ = graph_of((Table("a", 8, 8, ("f0",), "SUM", ("table_row_wise", 0)),), local_size=2)
    assert format_graph(graph_module).splitlines()[-6:] == [
        "ebc_output_dist_start = output_dist_start(ebc_lookup, ebc_dist_context) {operation=reduce_scatter}",
        "ebc_output_dist_wait = output_dist_wait(ebc_output_dist_start)",
        "ebc_output_dist_start_1 = output_dist_start(ebc_output_dist_wait, ebc_dist_context) {operation=cross_host}",
        "ebc_output_dist_wait_1 = output_dist_wait(ebc_output_dist_start_1)",
        "ebc_keyed_tensor = keyed_tensor(ebc_output_dist_wait_1)",
        "return ebc_keyed_tensor",
    ]


def test_ids_are_hashed_where_they_have_arrived() -> None:
    graph_module, _ = graph_of(
        (Table("a", 64, 8, ("f0",), "MEAN", ("row_wise",)),), recfx.HashConfig(dense_rows=0, buckets=8)
    )
    (hash_ids,) = nodes_of_kind(graph_module, "hash_ids")
    (lookup,) = nodes_of_kind(graph_module, "lookup")
    assert hash_ids.all_input_nodes[0].name == "ebc_ids"
    assert lookup.all_input_nodes == [hash_ids]
    meta = node_meta(hash_ids)
    assert meta is not None
    # A quarter of the rows: a quarter of everybody's ids, if they are asked for evenly.
    assert meta.shape[0].equals(WORLD * BATCH * mean_length("f0") / 4)


def test_without_a_plan_nothing_changes() -> None:
    standard = EmbeddingBagCollection(tables=[Table("a", 8, 8, ("f0",)).config()])
    graph_module = recfx.convert(standard).unexpanded_graph()  # type: ignore[operator]
    record = next(r for r in run_passes(graph_module, passes()) if r.name == "insert_dist")
    assert not record.modified
