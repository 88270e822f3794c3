"""What passes of the user's may leave: a graph that runs as it says, or one error; no operator is lost."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import apply_optimizer_in_backward

import recfx
from recfx.collections.compile_graph import graphs_of_modes
from recfx.collections.sharding.collection import Stages
from recfx.ir import NODE_KINDS, Input, NodeKind, Stage, ValueType
from recfx.ir.context import CollectionContext
from recfx.ir.operator_graph import OperatorGraph
from recfx.passes import PassResult, Rewrite
from recfx.runtime.lower_graph import OWN_MAKERS
from tests.builders.plans import plan_of_kinds
from tests.sharding.ranks import ranks
from tests.support.refusals import refused

BATCH = KeyedJaggedTensor(["f", "g"], torch.tensor([3, 0, 3, 9, 1]), lengths=torch.tensor([2, 0, 1, 1, 0, 1]))
RAW = recfx.HashConfig(dense_rows=0)
KIND = NodeKind("drop_ids", "no ids", (Input((ValueType.IDS,)),), Stage.SELECT, like_input=True)


class DropIds(nn.Module):
    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(ids.keys(), ids.values()[:0], lengths=torch.zeros_like(ids.lengths()))


def model() -> nn.Module:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=10, feature_names=[feature])
        for name, feature in (("a", "f"), ("b", "g"))
    ]
    return nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables)})


def on_ids_of_one(graph: OperatorGraph) -> PassResult:
    lookup = graph.of_kind("lookup")[-1]
    (ids,) = lookup.all_input_nodes
    with graph.graph.inserting_before(lookup):
        lookup.replace_input_with(ids, graph.add(KIND.name, (ids,), "ebc"))
    return PassResult(graph)


@pytest.mark.parametrize("before", ["insert_dist", "insert_hash", "batch_lookups"])
def test_an_operator_on_the_ids_of_one_table_is_kept(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NODE_KINDS, KIND.name, KIND)
    monkeypatch.setitem(OWN_MAKERS, KIND.name, lambda of: DropIds())

    position = [one_pass.name for one_pass in recfx.passes()].index(before)
    passes = [*recfx.passes()[:position], Rewrite("insert", on_ids_of_one), *recfx.passes()[position:]]
    converted = recfx.convert(model(), hashing=None, passes=passes)
    assert "ebc_drop_ids" in [node.name for node in converted.ebc.graph_module.graph.nodes]
    assert not converted.ebc(BATCH)["g"].any()
    torch.testing.assert_close(converted.ebc(BATCH)["f"], model().ebc(BATCH)["f"])


def test_several_nodes_that_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NODE_KINDS, KIND.name, KIND)
    monkeypatch.setitem(OWN_MAKERS, KIND.name, lambda of: nn.Identity())
    expand, dist, *rest = recfx.passes()
    passes = [expand, dist, Rewrite("hand_on", on_ids_of_one), *rest]
    converted, plain = recfx.convert(model(), hashing=RAW, passes=passes), recfx.convert(model(), hashing=RAW)
    names = [node.name for node in converted.ebc.graph_module.graph.nodes]
    assert {"ebc_hash_ids", "ebc_hash_ids_1"} <= set(names)
    for mode in (True, True, False):
        answers = [model.train(mode).ebc(BATCH).values() for model in (converted, plain)]
        torch.testing.assert_close(*answers, rtol=1e-6, atol=0)
    graph_module = converted.train().ebc.graph_module
    assert {ids for _, ids, _ in Stages(graph_module).hashing} == {"ebc_select_features", "ebc_drop_ids"}
    monkeypatch.setattr(CollectionContext, "copies_ids", property(lambda _: True))
    _, _, (record,), _ = graphs_of_modes(graph_module, converted.ebc._runtime)
    assert [decline.code for decline in record.declined] == ["several_hash_ids"] * 2
    with refused("several_hash_ids", "ebc"):
        recfx.convert(model(), hashing=recfx.HashConfig(dense_rows=0, on_full="evict"), passes=passes)


def edited(edit: Callable[[OperatorGraph], Any], *, of_ranks: bool = False) -> Rewrite:
    """A pass that edits a graph, or only those of sharded collections."""
    return Rewrite("edit", partial(_edited, edit, of_ranks))


def _edited(edit: Callable[[OperatorGraph], Any], of_ranks: bool, graph: OperatorGraph) -> PassResult:
    if not of_ranks or any(collection.sharding is not None for collection in graph.context.collections.values()):
        edit(graph)
    return PassResult(graph)


def keyed(graph: OperatorGraph) -> fx.Node:
    (node,) = graph.of_kind("keyed_tensor")
    return node


def calls_torch(graph: OperatorGraph) -> None:
    part = keyed(graph).all_input_nodes[0]
    with graph.graph.inserting_before(keyed(graph)):
        keyed(graph).replace_input_with(part, graph.graph.call_function(torch.relu, (part,)))


def takes_more(graph: OperatorGraph) -> None:
    with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
        graph.graph.placeholder("more")


def returns_pooled(graph: OperatorGraph) -> None:
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    output.args = (keyed(graph).all_input_nodes[0],)
    graph.remove_unused()


def returns_twice(graph: OperatorGraph) -> None:
    graph.graph.output(keyed(graph))


def without_a_table(graph: OperatorGraph) -> None:
    keyed(graph).args = keyed(graph).args[1:]
    graph.remove_unused()


def takes_a_list(graph: OperatorGraph) -> None:
    keyed(graph).args = (list(keyed(graph).args),)


def belongs_to_nothing(graph: OperatorGraph) -> None:
    keyed(graph).kwargs = {}


def of_another_context(graph: OperatorGraph) -> None:
    graph.context = recfx.convert(model(), hashing=RAW).ebc.unexpanded_graph().context


def pools_maxima(graph: OperatorGraph) -> None:
    for lookup in graph.of_kind("lookup"):
        graph.change(lookup, combine="MAX")


def raises(graph: OperatorGraph) -> None:
    raise KeyError("mine")


@pytest.mark.parametrize("position", [1, 8])
@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (calls_torch, "malformed_graph"),
        (takes_more, "malformed_graph"),
        (returns_pooled, "malformed_graph"),
        (returns_twice, "malformed_graph"),
        (takes_a_list, "malformed_graph"),
        (belongs_to_nothing, "malformed_graph"),
        (of_another_context, "malformed_graph"),
        (pools_maxima, "malformed_graph"),
        (raises, "pass_failed"),
    ],
)
def test_one_error(edit: Callable[[OperatorGraph], Any], reason: str, position: int) -> None:
    given, original = [*recfx.passes()], model()
    with refused(reason, "ebc"):
        recfx.convert(original, passes=[*given[:position], edited(edit), *given[position:]])
    assert type(original.ebc) is EmbeddingBagCollection


def test_a_table_that_is_left_out() -> None:
    expand, *rest = recfx.passes()
    with refused("malformed_graph", "ebc"):
        recfx.convert(model(), passes=[expand, edited(without_a_table), *rest])


def test_lookups_of_raw_ids_are_refused() -> None:
    passes = [one_pass for one_pass in recfx.passes() if one_pass.name != "insert_hash"]
    with refused("not_hashed", "ebc"):
        recfx.convert(model(), hashing=RAW, passes=passes)
    recfx.convert(model(), hashing=None, passes=passes)


def test_a_pass_that_fails_when_an_optimizer_is_attached() -> None:
    def fails(graph: OperatorGraph) -> None:
        (collection,) = graph.context.collections.values()
        if any(facts.optimizer for facts in collection.facts.values()):
            raise KeyError("mine")

    converted = recfx.convert(model(), passes=[*recfx.passes(), edited(fails)])
    apply_optimizer_in_backward(torch.optim.SGD, converted.ebc.parameters(), {"lr": 0.1})
    for _ in range(2):  # nor does it go on with the graph from before
        with pytest.raises(recfx.ConversionError, match="pass edit raised"):
            converted.ebc(BATCH)


def exchanges_ways_back(graph: OperatorGraph) -> None:
    other = {"row_wise": "table_wise", "table_wise": "row_wise"}
    for node in graph.of_kind("output_dist_start"):
        graph.change(node, way=other[str(node.kwargs["way"])])


def stores(dtypes: list[Any], graph: OperatorGraph) -> None:
    for node in graph.of_kind("lookup"):
        graph.change(node, stored=tuple(dtypes))


def without_routing(graph: OperatorGraph) -> None:
    for node in graph.of_kind("bucketize"):
        graph.replace(node, node.all_input_nodes[0])
    graph.remove_unused()


def reads_own_ids(graph: OperatorGraph) -> None:
    (selected,) = graph.of_kind("select_features")
    for lookup in graph.of_kind("lookup"):
        lookup.args = (selected, *lookup.args[1:])


def plan() -> ShardingPlan:
    return plan_of_kinds("ebc", model().ebc, {"a": row_wise(), "b": table_wise(rank=0)}, 2)


@pytest.mark.parametrize(
    "edit", [without_routing, exchanges_ways_back, partial(stores, ["fp16"]), partial(stores, [torch.float16] * 2)]
)
def test_wrong_graphs_of_ranks(edit: Callable[[OperatorGraph], Any]) -> None:
    converted = recfx.convert(model(), passes=[*recfx.passes(), edited(edit, of_ranks=True)])
    with refused("malformed_graph", "ebc"):
        recfx.cost(converted, plan=plan(), world_size=2).at(8, L=3)


@pytest.mark.parametrize(
    "passes",
    [
        [one_pass for one_pass in recfx.passes() if one_pass.name != "insert_dist"],
        recfx.passes()[:1],
        [*recfx.passes()[:2], edited(reads_own_ids, of_ranks=True), *recfx.passes()[2:]],
    ],
)
def test_lookups_of_sharded_tables_read_what_other_ranks_send(passes: Any) -> None:
    converted = recfx.convert(model(), hashing=None, passes=passes)
    with refused("not_distributed", "ebc"):
        recfx.cost(converted, plan=plan(), world_size=2).at(8, L=3)
    for reason in ranks(2).run(refused_on_ranks, passes):
        assert reason == "not_distributed"


def refused_on_ranks(rank: int, world_size: int, passes: Any) -> str:
    try:
        recfx.convert(model(), hashing=None, plan=plan(), passes=passes)
    except recfx.ConversionError as error:
        return error.reason
    return ""
