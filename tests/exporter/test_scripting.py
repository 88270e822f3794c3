"""``torch.jit.script`` of converted models and of their graphs, as users call it."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchrec.fx
from torch import fx, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model

import recfx
from recfx.exporter.torch_entry import _replacing
from tests.builders.batches import one_bag
from tests.builders.collections import one_table
from tests.exporter.hashed_models import TRACES, HashedModel, call, trained
from tests.sharding.ranks import ranks
from tests.support.refusals import refused

WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    **TRACES,
    "torchrec.fx, with the model as a leaf": lambda model: torchrec.fx.symbolic_trace(
        Holder(model), leaf_modules=["HashedModel"]
    ),
    "recfx.trace in a module": lambda model: Holder(recfx.trace(model, call(6, low=0))).eval(),
}


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.inner(dense, features)


@dataclass
class Both:
    dense: torch.Tensor
    features: KeyedJaggedTensor


class TakesBoth(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training

    def forward(self, both: Both) -> torch.Tensor:
        return self.inner(both.dense, both.features)


@pytest.fixture
def model() -> nn.Module:
    return trained()


def saved_and_loaded(scripted: torch.jit.ScriptModule) -> Any:
    content = io.BytesIO()
    torch.jit.save(scripted, content)
    content.seek(0)
    return torch.jit.load(content)


@pytest.mark.parametrize("way", WAYS)
def test_the_script_answers_as_the_model_does(model: nn.Module, way: str) -> None:
    taken = WAYS[way](model)
    loaded = saved_and_loaded(torch.jit.script(taken))
    for batch_size, low, high in ((5, -20, 20), (1, -(2**63), 2**63 - 1), (0, 0, 1)):
        sample = call(batch_size, seed=9, low=low, high=high)
        torch.testing.assert_close(loaded(*sample.args), model(*sample.args), rtol=1e-5, atol=1e-6)


def test_a_weighted_collection() -> None:
    model, sample = trained(is_weighted=True), call(5, seed=9, is_weighted=True)
    loaded = saved_and_loaded(torch.jit.script(fx.symbolic_trace(model)))
    torch.testing.assert_close(loaded(*sample.args), model(*sample.args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_scripted_does_not_change(model: nn.Module, way: str) -> None:
    taken = WAYS[way](model)
    modules = {name: id(module) for name, module in taken.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.jit.script(taken)
    assert {name: id(module) for name, module in taken.named_modules()} == modules
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.train()
    model(*call(4, seed=3, low=300, high=400).args).sum().backward()
    assert not torch.equal(
        model.state_dict()["ebc.embedding_bags.mean.weight"], state["ebc.embedding_bags.mean.weight"]
    )


@pytest.mark.parametrize("way", WAYS)
def test_in_training_mode_collections_are_compiled_for_eval_and_that_is_said_once(model: nn.Module, way: str) -> None:
    sample = call(5, seed=9)
    expected = model(*sample.args)
    taken = WAYS[way](model.train())
    modes = {name: module.training for name, module in taken.named_modules()}
    with pytest.warns(UserWarning, match="scripted_for_eval") as said:
        scripted = torch.jit.script(taken)
    (warning,) = [entry for entry in said if "converted" in str(entry.message)]
    assert "[scripted_for_eval]" in str(warning.message)
    assert "model.eval()" in str(warning.message)
    assert warning.filename == __file__
    assert scripted.training == taken.training
    assert {name: module.training for name, module in taken.named_modules()} == modes
    torch.testing.assert_close(saved_and_loaded(scripted)(*sample.args), expected, rtol=1e-5, atol=1e-6)


class WithDropout(nn.Module):
    """What it answers in training mode differs from what it answers in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = HashedModel()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.drop(self.norm(self.inner(dense, features)))


@pytest.mark.filterwarnings("ignore:.*scripted_for_eval")
@pytest.mark.parametrize("way", ["the model", "torch.fx", "recfx.trace", "whole_graph"])
def test_around_the_collections_a_script_trains_as_that_of_the_standard_model_does(way: str) -> None:
    torch.manual_seed(0)
    plain = WithDropout()
    converted = recfx.convert(copy.deepcopy(plain))
    sample = call(6, low=0)
    answers, gradients, means = [], [], []
    for source, scripted in (
        (plain, torch.jit.script(plain)),
        (converted, torch.jit.script(WAYS[way](converted))),
    ):
        torch.manual_seed(1)
        answers.append(scripted(*sample.args))
        answers[-1].square().sum().backward()
        gradients.append(source.inner.linear.weight.grad)
        means.append(source.norm.running_mean)
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(means[1], means[0], rtol=1e-5, atol=1e-6)
    assert plain.inner.ebc.embedding_bags["mean"].weight.grad is not None
    assert converted.inner.ebc.embedding_bags["mean"].weight.grad is None  # which the warning says


def test_a_wrapper_in_training_mode_around_collections_in_eval_mode(model: nn.Module) -> None:
    wrapper = Holder(model).train(False)
    wrapper.training = True  # as of a module that was just made
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*scripted_for_eval")
        torch.jit.script(wrapper)


def test_a_graph_of_training_mode_stays_one(model: nn.Module) -> None:
    graph = recfx.trace(model.train(), call(6))
    model.eval()
    with pytest.warns(UserWarning, match=r"scripted_for_eval.*was traced"):
        torch.jit.script(graph.eval())


class Asks(nn.Module):
    """What TorchScript can ask a standard collection for."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = one_table()
        self.ebc.scale = 3.0
        self.ebc.after = nn.Linear(4, 4)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc.after(self.ebc(features).values()) * self.ebc.scale
        return pooled + torch.ones(1, device=self.ebc.device) if self.ebc.is_weighted() else pooled


def test_a_script_that_asks_its_collection_for_more() -> None:
    plain = Asks().eval()
    sample = one_bag(1, 2)
    expected = torch.jit.script(plain)(sample)
    answer = saved_and_loaded(torch.jit.script(recfx.convert(plain, hashing=None)))(sample)
    torch.testing.assert_close(answer, expected)


def test_a_graph_that_takes_a_dataclass_is_referred_to_export(model: nn.Module) -> None:
    taken = TakesBoth(model)
    sample = recfx.Sample(Both(*call(6).args))
    for graph in (fx.symbolic_trace(taken), recfx.trace(taken, sample)):
        for node in graph.graph.find_nodes(op="placeholder"):
            node.type = Both  # as it is where annotations are not postponed
        with refused("not_scriptable", match=r"argument both, which is a Both.*recfx\.export", error=recfx.ExportError):
            torch.jit.script(graph)


def test_nodes_of_a_collection_that_were_rewired(model: nn.Module) -> None:
    graph_module = recfx.trace(model, call(6))
    dense, *rest = graph_module.graph.nodes
    last = next(node for node in reversed(rest) if ".graph_module." in str(node.target))
    last.insert_arg(1, dense)
    with refused("not_scriptable", "ebc", match="graph was changed", error=recfx.ExportError):
        torch.jit.script(graph_module)


def test_tables_that_are_not_on_the_cpu() -> None:
    converted = recfx.convert(HashedModel().to("meta"), device="meta").eval()
    with refused("not_scriptable", "ebc", match=r"on meta.*model\.to\('cpu'\)", error=recfx.ExportError):
        torch.jit.script(converted)


def test_other_models_are_compiled_as_ever() -> None:
    scripted = torch.jit.script(HashedModel())
    sample = call(3, low=0)
    assert saved_and_loaded(scripted)(*sample.args).shape == (3, 2)


def _script_sharded(rank: int, world_size: int) -> tuple[str, str, str]:
    converted = recfx.convert(nn.Sequential(HashedModel().ebc))
    parallel = torchrec.distributed.DistributedModelParallel(converted, device=torch.device("cpu"))
    with pytest.raises(recfx.ExportError) as caught:
        torch.jit.script(parallel.module.eval())
    return caught.value.reason, caught.value.module_path, caught.value.what_to_do


def test_a_sharded_model_is_referred_to_export() -> None:
    for reason, path, what_to_do in ranks(2).run(_script_sharded):
        assert (reason, path) == ("not_scriptable", "0")
        assert "recfx.export" in what_to_do


# Quantization


def _by_class(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {EmbeddingBagCollection: torch.ao.quantization.QConfig(1, 1)})


def _by_class_imported_before(model: nn.Module) -> nn.Module:
    quantize = inspect.unwrap(torch.ao.quantization.quantize_dynamic)
    return quantize(model, {EmbeddingBagCollection: torch.ao.quantization.QConfig(1, 1)})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "quantize",
    [
        lambda model: quantize_embeddings(model, dtype=torch.qint8, inplace=False),
        lambda model: quantize_embeddings(module=model, dtype=torch.qint8, inplace=True),
        quantize_inference_model,
        _by_class,
        _by_class_imported_before,
    ],
)
def test_torchrecs_quantization_of_a_converted_model_says_what_to_call(
    model: nn.Module, quantize: Callable[[nn.Module], nn.Module]
) -> None:
    with refused("not_quantized", "ebc", match=r"recfx\.export.*recfx\.unconvert", error=recfx.ExportError):
        quantize(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_dense_part_of_a_converted_model_is_quantized_as_ever(model: nn.Module) -> None:
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(quantized.linear) is not nn.Linear
    assert type(quantized.ebc) is type(model.ebc)
    with torch.no_grad():
        difference = (quantized(*call(4).args) - model(*call(4).args)).abs().max()
    assert 0 < float(difference) < 0.1


def test_another_tool_may_have_wrapped_torch_functions_before() -> None:
    """The wrapper's signature names no module."""

    def wrapped(*a: Any, **k: Any) -> Any:
        return a, k

    extended = _replacing(lambda model, arguments: "replaced")(wrapped)  # type: ignore[arg-type,return-value]
    converted = recfx.convert(one_table())
    module = nn.Linear(1, 1)
    assert extended(converted, 1, more=2) == (("replaced", 1), {"more": 2})
    assert extended(more=2, model=converted) == ((), {"more": 2, "model": "replaced"})
    assert extended(module, more=2) == ((module,), {"more": 2})
    assert extended() == ((), {})
