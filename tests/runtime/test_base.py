"""Under every torch.fx tracer a converted collection, and each node of its graph, is one leaf call."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec.fx
from torch import fx, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.test_utils.test_model import ModelInput
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

import recfx
from recfx.collections.collection import unsharded_collections
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.models import ZOO, Case
from tests.models.case import BATCH_SIZES, run
from tests.models.handwritten import Tower
from tests.support.refusals import refused

Trace = Callable[[nn.Module], fx.GraphModule]
TRACERS: list[Trace] = [torch.fx.symbolic_trace, torchrec.fx.symbolic_trace]
RAW = recfx.HashConfig(dense_rows=0)

# What no tracer can follow in the standard model either: loops over proxies, control flow on data, `len`, wrappers.
UNTRACEABLE = {
    "branches_on_data", "branches_on_data_below_the_root", "builds_from_jagged", "ddp",
    "preprocessing_collections", "preprocessing_module", "python_keyword", "regrouped",
    "sparse_nn_negatives", "sparse_nn_negatives_with_parameters", "sparse_nn_over_large",
    "sparse_nn_position_weighted", "torch_compile", "variadic", "variadic_by_name", "optional_arguments",
    "optional_arguments_absent", "hooks", "sequence_dims", "sequence_to_dense",
}  # fmt: skip
# What they follow in the converted model alone: their graph of the standard collection does not run on these batches.
CONVERTED_ALONE = {"tensor_dict_input"}
TRACEABLE = [case for case in ZOO if case.name not in UNTRACEABLE]


def trained(graph: nn.Module, model: nn.Module, case: Case, size: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Outputs of the graph, and the gradients that they give to the model that was traced."""
    model.zero_grad(set_to_none=True)
    outputs = run(graph, case.sample(size), backward=True)
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_training(models: list[nn.Module], reference: nn.Module, case: Case, trace: Trace) -> None:
    """The graphs of ``models`` against that of ``reference``, or against itself where that has none that runs."""
    for training in (True, False):
        reference.train(training)
        expected = reference if case.name in CONVERTED_ALONE else traced(trace, reference)
        graphs = [traced(trace, model.train(training)) for model in models]
        for model, graph in zip(models, graphs, strict=True):
            calls = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
            for path, converted in unsharded_collections(model).items():
                assert not any(call.startswith(f"{path or converted.path_of_root()}.") for call in calls)
        for size in BATCH_SIZES:
            answers, gradients = trained(expected, reference, case, size)
            for model, graph in zip(models, graphs, strict=True):
                outputs, ours = trained(graph, model, case, size)
                assert len(outputs) == len(answers)
                for output, answer in zip(outputs, answers, strict=True):
                    assert output.requires_grad == answer.requires_grad
                    torch.testing.assert_close(output, answer, rtol=case.rtol, atol=case.atol)
                assert ours.keys() == gradients.keys()
                for name in set(ours) - set(case.skip_gradients):
                    assert_same_gradient(name, ours[name], gradients[name], case)


def traced(trace: Trace, model: nn.Module) -> fx.GraphModule:
    torch.manual_seed(4)  # random numbers that are drawn outside of modules are constants of a graph
    return trace(model)


def assert_same_gradient(name: str, gradient: torch.Tensor | None, reference: torch.Tensor | None, case: Case) -> None:
    if gradient is None or reference is None:  # a table that no id read may have zeros or nothing
        assert not any(one is not None and one.any() for one in (gradient, reference)), name
    else:
        torch.testing.assert_close(gradient, reference, rtol=case.rtol, atol=case.atol, msg=name)


def converted_tower() -> nn.Module:
    return recfx.convert(Tower())


def pickled(model: fx.GraphModule) -> fx.GraphModule:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("trace", TRACERS, ids=["torch", "torchrec"])
@pytest.mark.parametrize("again", [copy.deepcopy, pickled, "retrace"], ids=["deepcopy", "pickle", "retrace"])
@pytest.mark.parametrize("build", [converted_tower, lambda: recfx.convert(collection())], ids=["below", "root"])
def test_a_graph_is_copied_pickled_and_traced_again(build: Any, again: Any, trace: Trace) -> None:
    model = build()
    graph = trace(model)
    graph.graph.lint()
    copied = trace(graph) if again == "retrace" else again(graph)
    features = batch(4)
    (expected, answer) = (module(features) for module in (model, copied))
    if isinstance(expected, torch.Tensor):
        assert torch.equal(answer, expected)
    else:
        assert torch.equal(answer.values(), expected.values())
    assert [node.op for node in copied.graph.nodes] == [node.op for node in graph.graph.nodes]


def test_the_node_has_the_path_and_the_class_of_the_collection() -> None:
    (node,) = torch.fx.symbolic_trace(converted_tower()).graph.find_nodes(op="call_module", target="ebc")
    assert [entry[0] for entry in node.meta["nn_module_stack"].values()] == ["ebc"]


@pytest.mark.parametrize("trace", TRACERS, ids=["torch", "torchrec"])
def test_hooks_are_traced_as_those_of_the_standard_collection(trace: Trace) -> None:
    """They run with proxies, while tracing, and not again with the graph."""
    features = batch(4)
    outputs = []
    for convert in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Tower()
        if convert:
            model = recfx.convert(model)
        seen: list[type] = []
        ebc: Any = model.get_submodule("ebc")
        ebc.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(type(args[0])))
        ebc.register_forward_hook(lambda module, args, output, seen=seen: seen.append(type(output)))
        ebc.register_forward_hook(lambda module, args, output: Doubled(output))
        graph = trace(model)
        assert seen == [fx.Proxy, fx.Proxy]
        outputs.append(graph(features))
        assert seen == [fx.Proxy, fx.Proxy]
        torch.testing.assert_close(outputs[-1], model(features))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)


class Doubled:
    def __init__(self, keyed: Any) -> None:
        self.keyed = keyed

    def values(self) -> Any:
        return self.keyed.values() * 2


class ByKeyword(Tower):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(self.ebc(features=features).values())


class CallsForward(Tower):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(self.ebc.forward(features).values())


class FromTensors(Tower):
    """Makes the batch inside, of proxies."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        made = KeyedJaggedTensor(["f1", "f2", "f3"], features.values(), lengths=features.lengths())
        return self.linear(self.ebc(made).values())


class Catalogue(Tower):
    """Its ids are a buffer: no argument of the collection is a proxy."""

    def __init__(self) -> None:
        super().__init__()
        features = batch(4)
        self.register_buffer("ids", features.values())
        self.register_buffer("lengths", features.lengths())

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        made = KeyedJaggedTensor(["f1", "f2", "f3"], self.ids, lengths=self.lengths)
        return self.linear(self.ebc(made).values()) + features.values().sum()


class Twice(Tower):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(self.ebc(features).values()) + self.linear(self.ebc(features).values())


@pytest.mark.parametrize("trace", TRACERS, ids=["torch", "torchrec"])
@pytest.mark.parametrize("kind", [ByKeyword, CallsForward, FromTensors, Catalogue, Twice])
def test_every_way_to_call_the_collection(kind: type[Tower], trace: Trace) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = recfx.convert(copy.deepcopy(plain))
    graph = trace(model)
    assert graph.graph.find_nodes(op="call_module", target="ebc")
    case = Case("tower", kind, lambda size: recfx.Sample(batch(size)))
    for _ in range(2):
        expected, gradients = trained(plain, plain, case, 4)
        answer, ours = trained(graph, model, case, 4)
        torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6)
        for one in (plain, model):
            torch.optim.SGD(one.parameters(), lr=0.1).step()


class EntersAll(fx.Tracer):
    """Has no leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear)


class LeavesAll(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


@pytest.mark.parametrize("tracer", [EntersAll, LeavesAll])
def test_a_tracer_with_rules_of_its_own(tracer: type[fx.Tracer]) -> None:
    model = converted_tower()
    graph = fx.GraphModule(model, tracer().trace(model))
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    assert calls == ["ebc", "linear"]
    features = batch(4)
    assert torch.equal(graph(features), model(features))


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("trace", TRACERS, ids=["torch", "torchrec"])
def test_a_whole_graph_is_traced_node_by_node(trace: Trace, mode: bool) -> None:
    model = recfx.convert(Tower(), sample=(batch(4),), whole_graph=True).train(mode)
    graph = trace(model)
    assert any("lookup" in str(node.target) for node in graph.graph.nodes)
    features = batch(3)
    assert torch.equal(graph(features), model(features))


def test_the_graph_inside_a_collection_is_traced_node_by_node() -> None:
    ebc: Any = recfx.convert(collection())
    graph = torch.fx.symbolic_trace(ebc.graph_module)
    assert len(graph.graph.nodes) == len(ebc.graph_module.graph.nodes)
    features = batch(4)
    assert torch.equal(graph(features).values(), ebc(features).values())


class Trains(nn.Module):
    """As TorchRec's pipelines want it: the loss, and predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, call: ModelInput) -> tuple[torch.Tensor, torch.Tensor]:
        predicted = self.tower(call.idlist_features)
        return (predicted - 1).square().mean(), predicted.detach()


def inputs() -> list[ModelInput]:
    torch.manual_seed(7)
    return [ModelInput(torch.rand(4, 2), batch(4), None, torch.rand(4)) for _ in range(4)]


@pytest.mark.parametrize("pipeline", [TrainPipelineBase, TrainPipelineSparseDist])
@pytest.mark.parametrize("hashing", ["adopted", "static", "hashed"])
def test_torchrecs_pipelines_around_an_unsharded_model(pipeline: Any, hashing: str) -> None:
    torch.manual_seed(0)
    plain = Trains()
    requested: Any = {"adopted": recfx.HashConfig(), "static": None, "hashed": RAW}[hashing]
    model = recfx.convert(copy.deepcopy(plain), hashing=requested)
    reference = plain if hashing != "hashed" else copy.deepcopy(model)
    outputs = {}
    for name, one, kind in (("plain", reference, TrainPipelineBase), ("converted", model, pipeline)):
        optimizer = torch.optim.Adagrad(one.parameters(), lr=0.1)
        progress = kind(one, optimizer, torch.device("cpu"))
        batches = iter(inputs())
        outputs[name] = [progress.progress(batches) for _ in range(4)]
    torch.testing.assert_close(outputs["converted"], outputs["plain"], rtol=1e-5, atol=1e-6)
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def test_a_subclass_of_the_collection_is_a_leaf() -> None:
    class Own(EmbeddingBagCollection):
        pass

    plain = Own(collection().embedding_bag_configs())
    graph = torch.fx.symbolic_trace(nn.Sequential(recfx.convert(plain)))
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_module"] == ["0"]


def test_a_graph_of_one_collection_is_not_scripted() -> None:
    model = converted_tower().eval()
    with refused("not_scriptable", "ebc", match=r"recfx\.export.*unconvert"):
        torch.jit.script(recfx.trace(model.ebc, (batch(4),)))


# The models of the zoo, at last, because they take long


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", TRACEABLE, ids=lambda case: case.name)
def test_the_graph_of_a_converted_model_is_that_of_the_standard_one(case: Case) -> None:
    with case.around():
        model = case.model()
        for trace, hashings in zip(TRACERS, ([recfx.HashConfig()], [recfx.HashConfig(), None]), strict=True):
            models = [recfx.convert(copy.deepcopy(model), hashing=hashing) for hashing in hashings]
            assert_same_training(models, model, case, trace)


HASHED = (
    "dlrm",
    "deep_fm",
    "sparse_nn",
    "tower_sparse_nn",
    "root_is_the_collection",
    "din",
    "hstu",
    "sequence_need_indices",
)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", [case for case in ZOO if case.name in HASHED], ids=lambda case: case.name)
def test_the_graph_of_a_hashed_model_gives_ids_the_same_rows(case: Case) -> None:
    model = recfx.convert(case.model(), hashing=RAW)
    reference = copy.deepcopy(model)
    for training in (True, False):
        model.train(training)
        reference.train(training)
        graph = torchrec.fx.symbolic_trace(model)
        for size in BATCH_SIZES:
            expected, gradients = trained(reference, reference, case, size)
            answer, ours = trained(graph, model, case, size)
            for output, expected_output in zip(answer, expected, strict=True):
                assert torch.equal(output, expected_output)
            for name, gradient in gradients.items():
                assert (gradient is None) == (ours[name] is None)
                assert gradient is None or torch.equal(ours[name], gradient)


def test_the_zoo_has_these_cases() -> None:
    assert {case.name for case in ZOO} > UNTRACEABLE | CONVERTED_ALONE | set(HASHED)
