"""Passes and operators of the user's: a model runs, trains, is sharded, copied, explained and exported with them."""

import copy
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.ir import Input, NodeKind, Stage, ValueType
from recfx.ir.operator_graph import OperatorGraph
from recfx.passes import PassResult, Rewrite
from recfx.runtime.lookup import Lookup
from tests.builders.optimizers import attach
from tests.drawing.page_data import data_of, text_of
from tests.support.own_operators import forgotten_afterwards
from tests.support.refusals import refused
from tests.toys.count_ids import CountIds, insert_count_ids
from tests.toys.own_operators import SCALE, Model, Scale, ScaleAll, declare, with_counts

BATCH = KeyedJaggedTensor(["f", "g"], torch.tensor([3, 0, 3, 9, 1]), lengths=torch.tensor([2, 0, 1, 1, 0, 1]))
RAW = recfx.HashConfig(dense_rows=0)


def scaled(by: float) -> list[Any]:
    return [*recfx.passes(), ScaleAll(by)]


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    with forgotten_afterwards():
        declare()
        yield


@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(), RAW])
@pytest.mark.parametrize("whole_graph", [False, True])
def test_a_model_runs_and_trains(hashing: recfx.HashConfig | None, whole_graph: bool) -> None:
    original = Model()
    model = recfx.convert(original, (BATCH,), hashing=hashing, whole_graph=whole_graph, passes=with_counts())
    (counting,) = (module for module in model.modules() if isinstance(module, CountIds))
    before = dict(counting.counts)
    output = model(BATCH)
    assert {key: counting.counts[key] - before[key] for key in before} == {"f": 3, "g": 2}
    if hashing != RAW:  # its rows are new: convert has compared it on mapped ids
        torch.testing.assert_close(output, original(BATCH), rtol=1e-5, atol=1e-6)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output.sum().backward()
    optimizer.step()
    assert all(not torch.equal(new, old) for new, old in zip(model.parameters(), weights, strict=True))
    printed = recfx.trace(model, (BATCH,))
    assert "ebc_count_ids" in [node.name for node in printed.graph.nodes]


@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(), RAW])
def test_outputs_and_gradients_go_through_an_operator(hashing: recfx.HashConfig | None) -> None:
    plain = recfx.convert(Model(), hashing=hashing)
    tripled = recfx.convert(Model(), hashing=hashing, passes=scaled(3.0))
    one, other = (model.ebc(BATCH).values() for model in (plain, tripled))
    torch.testing.assert_close(other, 3 * one, rtol=0, atol=0)
    one.sum().backward()
    other.sum().backward()
    for name in ("a", "b"):
        torch.testing.assert_close(tripled.ebc.weight(name).grad, 3 * plain.ebc.weight(name).grad, rtol=1e-6, atol=0)
    assert "ebc_scale = scale(" in tripled.ebc.pass_records[-1].text
    text = recfx.ir.format_graph(tripled.ebc.graph_module)
    assert "{by=3.0}" in text  # also of the lowered graph


def changed(model: nn.Module) -> nn.Module:
    attach(model.ebc, "sgd")
    model(BATCH)  # takes the optimizer over, and makes the graph again
    return model


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


HAND_ON = NodeKind(
    "hand_on",
    "rows, as they are",
    inputs=(Input((ValueType.ROWS, ValueType.DEVICE_ROWS)),),
    stage=Stage.HASH,
    like_input=True,
)


def hand_on(graph: OperatorGraph, lookups: int | None = None) -> PassResult:
    """Insert the operator before all lookups, or the first ones."""
    for lookup in graph.of_kind("lookup")[:lookups]:
        rows = lookup.all_input_nodes[0]
        with graph.graph.inserting_before(lookup):
            lookup.replace_input_with(rows, graph.add("hand_on", (rows,), graph.collection(lookup).name))
    return PassResult(graph)


def with_sgd() -> Model:
    model = Model()
    attach(model.ebc, "sgd")
    return model


def assert_train_alike(model: nn.Module, other: nn.Module) -> None:
    for _ in range(3):
        outputs = [trained(BATCH) for trained in (model, other)]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
        for output in outputs:
            output.sum().backward()


@pytest.mark.parametrize("hashing", [RAW, recfx.HashConfig(dense_rows=0, on_full="evict")])
def test_an_operator_between_hashing_and_lookups(hashing: recfx.HashConfig, tmp_path: Path) -> None:
    recfx.add_operator(HAND_ON, lambda of: nn.Identity())
    *rest, fuse, transfers, lower = recfx.passes()
    model = recfx.convert(
        with_sgd(), hashing=hashing, passes=[*rest, Rewrite("hand_on", hand_on), fuse, transfers, lower]
    )
    declined = {decline.code for record in model.ebc.pass_records for decline in record.declined}
    assert "operator_in_between" in declined
    plain = recfx.convert(with_sgd(), hashing=hashing)
    assert_train_alike(model, plain)
    torch.testing.assert_close(model.eval()(BATCH), plain.eval()(BATCH), rtol=1e-5, atol=1e-6)
    with refused("operator_not_exported", "ebc", error=recfx.ExportError):
        recfx.export(model, tmp_path / "model.pt", (BATCH,))
    assert not list(tmp_path.iterdir())


def decided(kernel: str) -> Rewrite:
    def decide(graph: OperatorGraph) -> PassResult:
        for lookup in graph.of_kind("lookup", "hash_lookup"):
            graph.change(lookup, kernel=kernel)
        return PassResult(graph)

    return Rewrite("decide", decide)


@pytest.mark.parametrize("place", [None, -1])
def test_a_kernel_that_a_pass_decides_on_is_the_one_that_runs(place: int | None) -> None:
    passes = list(recfx.passes())
    passes.insert(len(passes) if place is None else place, decided("reference"))
    model = recfx.convert(Model(), passes=passes)
    kernels = [module.kernel for module in model.modules() if isinstance(module, Lookup)]
    assert set(kernels) == {"reference"}
    torch.testing.assert_close(model(BATCH), recfx.convert(Model())(BATCH), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("portable", [True, False])
def test_a_kernel_that_a_pass_decides_on_is_not_one_of_files(portable: bool, tmp_path: Path) -> None:
    model = recfx.convert(Model(), passes=[*recfx.passes(), decided("reference")]).eval()
    report = recfx.export(model, tmp_path / "model.pt", (BATCH,), portable=portable)
    assert "kernel_of_models" in {note.code for note in report.notes}
    torch.testing.assert_close(recfx.load(tmp_path / "model.pt")(BATCH), model(BATCH), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "again", [changed, copy.deepcopy, pickled, lambda model: model.double().float(), lambda model: model.eval()]
)
def test_graphs_that_are_made_again_have_it(again: Callable[[nn.Module], nn.Module]) -> None:
    model = again(recfx.convert(Model(), passes=scaled(2.0)))
    expected = 2 * recfx.convert(Model()).eval().ebc(BATCH).values()
    torch.testing.assert_close(model.ebc(BATCH).values(), expected, rtol=1e-6, atol=0)
    assert "ebc_scale" in [node.name for node in model.ebc.graph_module.graph.nodes]


def test_copies_run_what_passes_have_made_for_the_original() -> None:
    runs: list[str] = []

    def counted(graph: OperatorGraph) -> PassResult:
        runs.append("run")
        return PassResult(graph)

    model = recfx.convert(Model(), passes=[*recfx.passes(), Rewrite("counted", counted)], verify=False)
    runs.clear()
    copied = copy.deepcopy(model)
    assert not runs
    copied.double()  # its tables are others now
    assert runs == ["run"]


def test_standard_collections_have_none_of_it(caplog: pytest.LogCaptureFixture) -> None:
    original = Model()
    model = recfx.convert(original, passes=scaled(2.0))
    assert caplog.messages == []
    plain = recfx.unconvert(model)
    (message,) = caplog.messages
    assert "'ebc'" in message
    assert "[own_operators_dropped]: compute what scale computed" in message
    assert torch.equal(plain(BATCH), original(BATCH))
    assert not torch.equal(plain(BATCH), model(BATCH))


def test_costs_drawings_and_reports_have_it(tmp_path: Path) -> None:
    model = recfx.convert(Model(), passes=scaled(2.0))
    read = [str(node.forward.read_bytes) for node in recfx.cost(model).nodes if node.kind == "scale"]
    assert read == ["16*B", "12*B"]
    recfx.draw(model, tmp_path / "model.html")
    assert "scale" in text_of(tmp_path / "model.html")
    recfx.draw(model, tmp_path / "model.html")
    assert "scale_all" in str(data_of(tmp_path / "model.html"))
    assert re.search(r"ebc_scale\s.* scale_all", str(recfx.explain(model)))


@pytest.mark.parametrize(("format", "portable"), [("torchscript", True), ("torchscript", False), ("pt2", True)])
@pytest.mark.parametrize("hashing", [recfx.HashConfig(), RAW])
def test_files_have_it(hashing: recfx.HashConfig, format: str, portable: bool, tmp_path: Path) -> None:
    model = recfx.convert(Model(), hashing=hashing, passes=scaled(2.0))
    model(BATCH)  # gives rows to ids
    recfx.export(model.eval(), tmp_path / "model", (BATCH,), format=format, portable=portable)
    plain = recfx.convert(Model(), hashing=hashing)
    plain(BATCH)
    loaded = recfx.load(tmp_path / "model")
    torch.testing.assert_close(loaded(BATCH), model(BATCH), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(loaded(BATCH), plain.eval()(BATCH))


# Refusals


def nothing(graph: OperatorGraph) -> Any:
    """Returns no ``PassResult``."""


def unknown(graph: OperatorGraph) -> PassResult:
    (select,) = graph.of_kind("select_features")
    with graph.graph.inserting_after(select):
        graph.add("no_such_operator", (select,), graph.collection(select).name)
    return PassResult(graph)


@pytest.mark.parametrize(
    ("passes", "reason"),
    [
        (3, "invalid_argument"),
        ([*recfx.passes(), insert_count_ids], "invalid_argument"),
        ((), "not_lowered"),
        ([*recfx.passes(), Rewrite("nothing", nothing)], "malformed_graph"),
        ([*recfx.passes(), Rewrite("unknown", unknown)], "unknown_operator"),
        ([*recfx.passes(), ScaleAll(1)], "malformed_graph"),
    ],
)
def test_wrong_passes(passes: Any, reason: str) -> None:
    model = Model()
    with refused(reason):
        recfx.convert(model, passes=passes)
    assert type(model.ebc) is EmbeddingBagCollection
    if reason == "invalid_argument":
        with refused(reason):
            recfx.explain(model, passes=passes)
    else:
        assert reason in {error.code for error in recfx.explain(model, passes=passes).reasons}


def test_converting_again_with_other_passes() -> None:
    passes = scaled(2.0)
    converted = recfx.convert(Model(), passes=passes)
    assert recfx.convert(converted) is converted
    assert recfx.convert(converted, passes=scaled(2.0)) is converted
    with refused("already_converted", match="other passes"):
        recfx.convert(converted, passes=scaled(3.0))


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled * self.by


@pytest.mark.parametrize(("made", "reason"), [(Learned, "operator_with_state"), (int, "not_lowered")])
def test_what_cannot_run(made: Callable[[], Any], reason: str) -> None:
    recfx.add_operator(SCALE, lambda of: made())
    with refused(reason, "ebc"):
        recfx.convert(Model(), passes=scaled(2.0))


def test_an_operator_without_a_price() -> None:
    recfx.add_operator(SCALE, lambda of: Scale(of.attributes["by"]))
    model = recfx.convert(Model(), passes=scaled(2.0))
    with refused("kind_without_cost", match="pass price= to"):
        recfx.cost(model)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "lookup"},
        {"name": "my scale"},
        {"attributes": {"by": list}},
        {"attributes": {"collection": str}},
        {"cut_before": True},
        {"inputs": (Input((ValueType.BATCH,)),)},
        {"like_input": False, "outputs": ()},
    ],
)
def test_wrong_declarations(change: dict[str, Any]) -> None:
    with refused("invalid_argument"):
        recfx.add_operator(replace(SCALE, **change), Scale)  # type: ignore[arg-type]
