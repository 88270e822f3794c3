"""What ``recfx.verify`` notices, each fault alone, and what it leaves as it was."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor

import recfx
from recfx.models.verify_report import DIFFERENT, EQUAL, NOT_REPRODUCIBLE
from tests.builders.batches import two_bags
from tests.builders.collections import one_table
from tests.builders.optimizers import attach
from tests.support.refusals import refused

HASHED = recfx.HashConfig(dense_rows=0)
TABLE = "ebc.embedding_bags.t.weight"


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(pooled)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = one_table()
        self.head = Head()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.head(self.ebc(features).values())


def batch(ids: tuple[int, ...] = (1, 2, 3, 7)) -> KeyedJaggedTensor:
    return two_bags(*ids)


def pair(hashing: recfx.HashConfig | None = None) -> tuple[nn.Module, nn.Module]:
    """A model, and a conversion that a test may break: it shares nothing with the model."""
    model = Model()
    return model, copy.deepcopy(recfx.convert(model, hashing=hashing))


def checks_with(report: recfx.VerifyReport, status: str = DIFFERENT) -> set[tuple[str, str]]:
    return {(check.what, check.where) for check in report.of(status)}


def places(report: recfx.VerifyReport) -> set[tuple[str, str]]:
    return {(check.mode, check.batch) for check in report.of(DIFFERENT)}


EVERYWHERE = {(mode, size) for mode in ("train", "eval") for size in ("sample", "sample + 1")}


@pytest.mark.parametrize("hashing", [None, HASHED, recfx.HashConfig(rows=16)], ids=["adopted", "hashed", "partly"])
def test_a_right_conversion_is_ok(hashing: recfx.HashConfig | None) -> None:
    report = recfx.verify(*pair(hashing), (batch(),))
    assert report.ok
    assert report.of(EQUAL) == list(report.checks)
    assert {(check.mode, check.batch) for check in report.checks} == EVERYWHERE
    expected = {("outputs", "0"), ("buffers", "head.calls")}
    expected |= {(what, name) for what in ("gradients", "parameters") for name in (TABLE, "head.weight", "head.bias")}
    assert checks_with(report, EQUAL) == expected
    assert report.tables.keys() == {"ebc"}
    assert report.tables["ebc"].keys() == {"t"}
    assert report.tables["ebc"]["t"].keys() == {"output", "gradient", "weight"}
    assert all(value <= 1e-6 for value in report.tables["ebc"]["t"].values())


def test_a_wrong_output() -> None:
    model, wrong = pair()
    wrong.register_forward_hook(lambda module, inputs, output: output + 0.25)
    report = recfx.verify(model, wrong, (batch(),))
    assert not report.ok
    assert checks_with(report) == {("outputs", "0")}
    assert places(report) == EVERYWHERE
    assert all(check.largest == pytest.approx(0.25, abs=1e-6) for check in report.of(DIFFERENT))
    assert "FAILED" in str(report)
    assert report.tables["ebc"]["t"]["output"] == 0  # the collection is right
    assert recfx.verify(model, wrong, (batch(),), rtol=0, atol=0.5).ok
    assert not recfx.verify(model, wrong, (batch(),), rtol=0, atol=0.2).ok


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def double_gradients(module: nn.Module, inputs: object, output: KeyedTensor) -> KeyedTensor:
    return KeyedTensor(output.keys(), output.length_per_key(), Doubled.apply(output.values()))


def test_a_wrong_gradient_of_right_outputs() -> None:
    model, wrong = pair()
    wrong.ebc.register_forward_hook(double_gradients)
    report = recfx.verify(model, wrong, (batch(),))
    assert checks_with(report) == {("gradients", TABLE), ("parameters", TABLE)}
    assert places(report) == EVERYWHERE
    largest = report.tables["ebc"]["t"]
    assert largest["output"] == 0
    assert largest["gradient"] > 0
    assert largest["weight"] == pytest.approx(0.1 * largest["gradient"], rel=1e-4)  # the step's learning rate


def test_a_wrong_gradient_of_an_input() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
            self.ebc = EmbeddingBagCollection([config], is_weighted=True)

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return self.ebc(features).values()

    model = Weighted()
    model.requires_grad_(False)
    wrong = copy.deepcopy(recfx.convert(model))
    weights = torch.rand(4).requires_grad_()
    sample = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3, 7]), weights, lengths=torch.tensor([3, 1]))
    assert recfx.verify(model, wrong, (sample,)).ok
    wrong.ebc.register_forward_hook(double_gradients)
    differing = checks_with(recfx.verify(model, wrong, (sample,)))
    assert {what for what, _ in differing} == {"gradients"}
    assert all(where.startswith("input ") for _, where in differing)
    assert differing


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_optimizer_that_steps_wrongly(kind: type[torch.optim.Optimizer]) -> None:
    model = Model()
    attach(model.ebc, kind)
    converted = recfx.convert(model)
    assert recfx.verify(model, converted, (batch(),)).ok
    wrong = copy.deepcopy(converted)
    wrong.ebc.fused_optimizers()["t"].group["lr"] = 0.2
    report = recfx.verify(model, wrong, (batch(),))
    assert checks_with(report) == {("parameters", TABLE)}
    assert places(report) == EVERYWHERE
    assert report.tables["ebc"]["t"]["weight"] > 0
    assert "gradient" not in report.tables["ebc"]["t"]  # the optimizer took it


def test_a_wrong_buffer() -> None:
    def count_again(module: Head, inputs: object, output: object) -> None:
        module.calls += 1

    model, wrong = pair()
    wrong.head.register_forward_hook(count_again)
    report = recfx.verify(model, wrong, (batch(),))
    assert checks_with(report) == {("buffers", "head.calls")}
    assert all(check.largest == 1 for check in report.of(DIFFERENT))


@pytest.mark.parametrize(
    ("when", "where"),
    [
        (lambda module, output: output.shape[0] == 3, {("train", "sample + 1"), ("eval", "sample + 1")}),
        (lambda module, output: output.shape[0] == 2, {("train", "sample"), ("eval", "sample")}),
        (lambda module, output: not module.training, {("eval", "sample"), ("eval", "sample + 1")}),
        (lambda module, output: module.training, {("train", "sample"), ("train", "sample + 1")}),
    ],
    ids=["second_size", "first_size", "eval", "train"],
)
@pytest.mark.parametrize("fails", [False, True], ids=["differs", "raises"])
def test_a_fault_that_shows_only_there(
    when: Callable[[nn.Module, torch.Tensor], bool], where: set[tuple[str, str]], fails: bool
) -> None:
    def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        if not when(module, output):
            return output
        if fails:
            raise RuntimeError("only here")
        return output + 1

    model, wrong = pair()
    wrong.register_forward_hook(hook)
    report = recfx.verify(model, wrong, (batch(),))
    assert places(report) == where
    assert checks_with(report) == {("run", "converted") if fails else ("outputs", "0")}
    assert not fails or "RuntimeError: only here" in report.of(DIFFERENT)[0].message


def test_two_ids_that_read_each_others_rows() -> None:
    """In eval: in training the index is rebuilt for the check, from the listing that is right."""
    model, wrong = pair(HASHED)
    wrong.ebc(batch())
    assert recfx.verify(model, wrong, (batch(),)).ok
    index = wrong.ebc.index("t")
    rows = index.find(torch.tensor([1, 7]))
    slot_ids, slot_rows = index.slot_groups.data.chunk(2, dim=1)  # what is written without `data` is noticed
    holds = [slot_ids == id_ for id_ in (1, 7)]
    for place, row in zip(holds, rows.flip(0), strict=True):
        slot_rows[place] = row
    assert index.find(torch.tensor([1, 7])).tolist() == rows.flip(0).tolist()
    report = recfx.verify(model, wrong, (batch(),))
    assert {("outputs", "0"), ("gradients", TABLE), ("parameters", TABLE)} <= checks_with(report)
    assert ("eval", "sample") in places(report)


OWN_GENERATOR = torch.Generator()


class Noisy(Model):
    """Draws from a generator that nobody seeds."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = super().forward(features)
        return output, output + torch.rand(output.shape, generator=OWN_GENERATOR)


def test_a_random_model_is_not_reproducible_but_the_rest_is_compared() -> None:
    model = Noisy()
    converted = copy.deepcopy(recfx.convert(model))
    report = recfx.verify(model, converted, (batch(),))
    assert report.of(DIFFERENT) == []
    assert checks_with(report, NOT_REPRODUCIBLE) == {("outputs", "1")}
    assert len(report.of(NOT_REPRODUCIBLE)) == 4
    assert ("outputs", "0") in checks_with(report, EQUAL)
    assert report.ok
    converted.register_forward_hook(lambda module, inputs, output: (output[0] + 1, output[1]))
    report = recfx.verify(model, converted, (batch(),))
    assert checks_with(report) == {("outputs", "0")}  # what is steady still counts
    assert not report.ok


def fail(module: nn.Module, inputs: object) -> None:
    raise ValueError("broken")


def test_nothing_is_touched() -> None:
    model, converted = pair(HASHED)
    sample = batch()
    converted(sample).sum().backward()
    model(sample).sum().backward()
    model.eval()
    index = converted.ebc.index("t")
    states = [copy.deepcopy(one.state_dict()) for one in (model, converted)]
    gradients = [[parameter.grad.clone() for parameter in one.parameters()] for one in (model, converted)]
    counters, items = index.counters, index.items()
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(123)  # not what verify seeds with
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    assert recfx.verify(model, converted, (batch((20, 30, 40, 50)),)).ok
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state[1])
    assert np.random.get_state()[2] == numpy_state[2]
    assert random.getstate() == python_state
    for one, state, gradient in zip((model, converted), states, gradients, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())
        assert all(torch.equal(p.grad, expected) for p, expected in zip(one.parameters(), gradient, strict=True))
        assert not any(hasattr(parameter, "_in_backward_optimizers") for parameter in one.parameters())
    assert index.counters == counters
    assert all(torch.equal(now, before) for now, before in zip(index.items(), items, strict=True))
    assert not any(module.training for module in model.modules())
    assert all(module.training for module in converted.modules())
    assert not model.ebc._forward_hooks
    assert not converted.ebc._forward_hooks


def test_the_optimizer_in_backward_does_not_step() -> None:
    model = Model()
    attach(model.ebc, torch.optim.Adagrad)
    converted = recfx.convert(model)
    converted(batch()).sum().backward()
    weight, fused = converted.ebc.weight("t"), converted.ebc.fused_optimizers()["t"]
    before, total, step = weight.detach().clone(), fused.state["sum"].clone(), float(fused.state["step"])
    assert recfx.verify(model, converted, (batch(),)).ok
    assert torch.equal(weight, before)
    assert torch.equal(fused.state["sum"], total)
    assert float(fused.state["step"]) == step == 1


@pytest.fixture
def _determinism() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_determinism")
@pytest.mark.parametrize("fails", [False, True], ids=["ok", "raises"])
@pytest.mark.parametrize(("on", "warn_only"), [(False, False), (True, False), (True, True)])
def test_the_deterministic_flag_is_given_back(on: bool, warn_only: bool, fails: bool) -> None:
    model, converted = pair()
    if fails:
        converted.register_forward_pre_hook(fail)
    torch.use_deterministic_algorithms(on, warn_only=warn_only)
    assert recfx.verify(model, converted, (batch(),)).ok is not fails
    assert torch.are_deterministic_algorithms_enabled() is on
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only


def test_swapped_models_are_named_as_that() -> None:
    with refused("invalid_argument"):
        recfx.verify(*reversed(pair(HASHED)), (batch(),))


@pytest.mark.parametrize("name", ["rtol", "atol"])
@pytest.mark.parametrize("value", [-1e-9, float("inf"), float("nan"), None])
def test_tolerances_that_compare_nothing_are_refused(name: str, value: Any) -> None:
    with refused("invalid_argument", match=f"{name} is {value!r}"):
        recfx.verify(*pair(), (batch(),), **{name: value})
