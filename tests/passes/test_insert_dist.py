"""insert_dist: the graph of one rank, as text. In a fake process group: nothing is communicated."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec import EmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.compile_graph import compile_graph, context_now
from recfx.collections.sharding.collection import Stages
from recfx.collections.sharding.plan import read_plan
from recfx.collections.sharding.settings import optimizer_settings
from recfx.collections.sharding.shard import cut_tables
from recfx.ir import format_graph
from recfx.ir.context import CollectionContext
from recfx.ir.meta import BATCH, WORLD, find_module, mean_length, node_meta
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.ir.node_values import size_of
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.shards import CollectionSharding
from recfx.ir.verifier import GraphVerificationError
from recfx.lowering.registry import TargetsHere
from recfx.passes.base import PASSES_KEY, run_passes
from recfx.passes.insert_dist import insert_dist
from recfx.runtime.dist_groups import DistGroups
from recfx.runtime.hash_ids import HashIds
from recfx.runtime.lookup import Lookup
from recfx.runtime.lowered import Runtime
from tests.passes.small_collection import until
from tests.sharding.cases import Case, Table, plan_of

WORLD_SIZE = 4


@pytest.fixture(autouse=True)
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def planned(case: Case) -> tuple[recfx.HashEmbeddingBagCollection, CollectionSharding]:
    """The unsharded collection, and how its tables are sharded, seen from rank 1."""
    standard = EmbeddingBagCollection(tables=[table.config() for table in case.tables])
    converted = recfx.convert(standard, hashing=case.hashing)
    assert isinstance(converted, recfx.HashEmbeddingBagCollection)
    return converted, read_plan(converted.tables, plan_of(case, converted, WORLD_SIZE), 1, WORLD_SIZE)


def compiled(
    tables: tuple[Table, ...], hashing: recfx.HashConfig | None = None, local_size: int = 0, after: str = "insert_dist"
) -> tuple[fx.GraphModule, Runtime]:
    """The graph of rank 1 after a pass, and what it was lowered from."""
    converted, sharding = planned(Case(tables, hashing=hashing, local_size=local_size))
    groups = DistGroups.of(ShardingEnv.from_process_group(dist.group.WORLD), sharding.local_size)
    settings = optimizer_settings(converted, sharding, None, dense_as_torchrec=False)
    store = cut_tables(converted, sharding, groups.pooled, None, settings.fused)
    runtime = Runtime(store, groups)
    context = context_now(CollectionContext("", converted.tables, {}, sharding=sharding), runtime.store)
    return compile_graph(OperatorGraph.of(context, TargetsHere()), runtime, "auto", until(after)), runtime


def graph_of(*arguments: Any, **options: Any) -> tuple[fx.GraphModule, list[str]]:
    """The graph of rank 1 after a pass, and the messages of what that pass declined; arguments as for ``compiled``."""
    graph_module, _ = compiled(*arguments, **options)
    return graph_module, [declined.message for declined in graph_module.meta[PASSES_KEY][-1].declined]


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
        "ebc_lookup = lookup(ebc_ids) {tables=[a], combine=SUM, dtype=float32, optimizer=sgd}\n"
        "ebc_lookup_1 = lookup(ebc_ids) {tables=[b], combine=SUM, dtype=float32, optimizer=sgd}\n"
        "ebc_output_dist_start = output_dist_start(ebc_lookup, ebc_lookup_1, ebc_dist_context) "
        "{way=table_wise, operation=all_to_all}\n"
        "ebc_lookup_2 = lookup(ebc_ids) {tables=[c], combine=SUM, dtype=float32, optimizer=sgd}\n"
        "ebc_output_dist_start_1 = output_dist_start(ebc_lookup_2, ebc_dist_context) "
        "{way=row_wise, operation=reduce_scatter}\n"
        "ebc_lookup_3 = lookup(ebc_ids) {tables=[d], combine=SUM, dtype=float32, optimizer=sgd}\n"
        "ebc_output_dist_start_2 = output_dist_start(ebc_lookup_3, ebc_dist_context) "
        "{way=data_parallel, operation=own_batch}\n"
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
        "ebc_output_dist_start = output_dist_start(ebc_dist_context) {way=table_wise, operation=all_to_all}",
        "ebc_output_dist_wait = output_dist_wait(ebc_output_dist_start)",
        "ebc_keyed_tensor = keyed_tensor(ebc_output_dist_wait)",
        "return ebc_keyed_tensor",
    ]


@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(dense_rows=0, buckets=4)])
def test_a_rank_without_shards_sends_in_its_turn(hashing: recfx.HashConfig | None) -> None:
    """What it sends needs nothing of its own; sent when ids arrive, it would overtake what the ranks before it send."""
    tables = (Table("a", 8, 8, ("f0",), "SUM", ("table_wise", 3)), Table("b", 8, 8, ("f1",), "SUM", ("row_wise",)))
    graph_module, _ = compiled(tables, hashing, after="lower")
    stages = Stages(graph_module)
    assert bool(stages.hashing) == (hashing is not None)
    started = [name for name, *_ in stages.compute.steps if "output_dist_start" in name]
    assert started == ["ebc_output_dist_start", "ebc_output_dist_start_1"]
    assert stages.result == "ebc_keyed_tensor"
    assert not any("lookup" in name for name, *_ in stages.arrive.steps)


def test_rows_cut_inside_hosts_take_two_hops() -> None:
    graph_module, _ = graph_of((Table("a", 8, 8, ("f0",), "SUM", ("table_row_wise", 0)),), local_size=2)
    assert format_graph(graph_module).splitlines()[-6:] == [
        "ebc_output_dist_start = output_dist_start(ebc_lookup, ebc_dist_context) "
        "{way=table_row_wise, operation=reduce_scatter}",
        "ebc_output_dist_wait = output_dist_wait(ebc_output_dist_start)",
        "ebc_output_dist_start_1 = output_dist_start(ebc_output_dist_wait, ebc_dist_context) "
        "{way=table_row_wise, hop=1, operation=cross_host}",
        "ebc_output_dist_wait_1 = output_dist_wait(ebc_output_dist_start_1)",
        "ebc_keyed_tensor = keyed_tensor(ebc_output_dist_wait_1)",
        "return ebc_keyed_tensor",
    ]


HASHED = recfx.HashConfig(dense_rows=0, buckets=8)


def nodes_of_kind(graph_module: fx.GraphModule, kind: str) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if (meta := node_meta(node)) is not None and meta.kind == kind]


def test_ids_are_hashed_where_they_have_arrived() -> None:
    tables = Table("a", 64, 8, ("f0",), "MEAN", ("row_wise",)), Table("b", 8, 8, ("f1",), "SUM", ("table_wise", 1))
    graph_module, _ = graph_of(tables, HASHED, after="insert_hash")
    (hash_ids,) = nodes_of_kind(graph_module, "hash_ids")
    lookups = nodes_of_kind(graph_module, "lookup")
    assert hash_ids.all_input_nodes[0].name == "ebc_ids"
    assert [lookup.all_input_nodes for lookup in lookups] == [[hash_ids], [hash_ids]]
    module = find_module(graph_module, hash_ids)
    assert isinstance(module, HashIds)
    # In the order in which the ids arrive: what travels as whole rows comes before what is summed.
    assert [(table.name, table.num_embeddings) for table in module.indexes.tables] == [("b", 8), ("a", 16)]
    assert module.indexes.hashed == ("b", "a")
    meta = node_meta(hash_ids)
    assert meta is not None
    # A quarter of the rows: a quarter of everybody's ids, if they are asked for evenly.
    assert meta.shape[0].equals(WORLD * BATCH * (mean_length("f0") / 4 + mean_length("f1")))


def test_means_of_adopted_tables_are_divided_where_their_sums_have_arrived() -> None:
    graph_module, _ = graph_of(
        (Table("a", 8, 8, ("f0",), "MEAN", ("row_wise",)),), recfx.HashConfig(), after="elide_hash"
    )
    assert not nodes_of_kind(graph_module, "hash_ids")
    (lookup,), (divide,) = nodes_of_kind(graph_module, "lookup"), nodes_of_kind(graph_module, "mean_divide")
    module = find_module(graph_module, lookup)
    assert isinstance(module, Lookup)
    assert module.combine == "SUM"
    assert [node.name for node in divide.all_input_nodes] == ["ebc_output_dist_wait", "ebc_select_features"]


def test_what_passes_decide_of_whole_tables_is_so_of_their_shards() -> None:
    converted, sharding = planned(Case((Table("a", 8, 8, ("f0",), "MEAN", ("row_wise",)),)))
    context = context_now(CollectionContext("", converted.tables, {}, sharding=sharding), converted.store)
    graph = run_passes(OperatorGraph.of(context, TargetsHere()), until("expand_collection")).graph
    graph.change(graph.of_kind("lookup")[0], combine="SUM", kernel="reference")
    insert_dist(graph)
    assert [lookup.kwargs["kernel"] for lookup in graph.of_kind("lookup")] == ["reference"]
    assert not graph.of_kind("mean_divide")


def test_rows_that_are_not_combined_are_refused_and_counted_by_shard() -> None:
    case = Case((Table("a", 8, 8, ("f0",), "SUM", ("row_wise",)), Table("b", 8, 4, ("f1",), "SUM", ("table_wise", 1))))
    converted, sharding = planned(case)
    context = context_now(CollectionContext("", converted.tables, {}, sharding=sharding), converted.store)
    sharded, whole = (
        run_passes(OperatorGraph.of(context, TargetsHere()), until(last)).graph
        for last in ("insert_dist", "expand_collection")
    )
    for lookup in (*sharded.of_kind("lookup"), whole.of_kind("lookup")[0]):
        (whole if lookup.graph is whole.graph else sharded).change(lookup, combine=NOT_COMBINED)
    sizes = {sharded.tables(lookup)[0].name: size_of(sharded, lookup).shape for lookup in sharded.of_kind("lookup")}
    assert sizes == {"a": (WORLD * BATCH * mean_length("f0") / 4, 8), "b": (WORLD * BATCH * mean_length("f1"), 4)}
    with pytest.raises(GraphVerificationError, match="combine=NONE cannot be sent back"):
        insert_dist(whole)
