"""Collections that a model reaches where nothing can be replaced are refused by name, unless a sample clears them."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.collections.pooled import HashEmbeddingBagCollection
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.discovery.reaching import TARGETS, Helper, Reaching

HELD: dict[str, Any] = {}
HELD_IN_CONTEXT: contextvars.ContextVar[nn.Module] = contextvars.ContextVar("held")


class Registry:
    """A class of which nobody makes an instance."""

    held: Any = None


def _held_lookup(features: KeyedJaggedTensor) -> Any:
    return HELD["module"](features)


class ReadsGlobal(Reaching):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(HELD["module"](features).values())


class CallsGlobalFunction(Reaching):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.find(features).values())

    def find(self, features: KeyedJaggedTensor) -> Any:
        return next(_held_lookup(each) for each in [features])


class ReadsRegistry(Reaching):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(Registry.held(features).values())


class ReadsItsClass(Reaching):
    shared: Any = []  # noqa: RUF012

    @property
    def found(self) -> Any:
        return self.shared[0]

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.found(features).values())


class ReadsContext(Reaching):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(HELD_IN_CONTEXT.get()(features).values())


def _local_class(model: Reaching) -> None:
    module = model.block

    class Local(Reaching):
        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return self.over(module(features).values())

    model.__class__ = Local


def _class_with_a_default(model: Reaching) -> None:
    class Local(Reaching):
        def forward(self, features: KeyedJaggedTensor, module: Any = model.block.ebc) -> torch.Tensor:
            return self.over(module(features).values())

    model.__class__ = Local


def _generator(model: Reaching) -> None:
    def endless(module: nn.Module) -> Iterator[Any]:
        features = yield
        while True:
            features = yield module(features)

    running = endless(model.block)
    next(running)
    model.lookup = running.send  # type: ignore[method-assign]


def _iterator(model: Reaching) -> None:
    held = iter([model.block.ebc] * 100)
    model.lookup = lambda features: next(held)(features)  # type: ignore[method-assign]


def _weakly_held_helper(model: Reaching) -> None:
    helper = Helper(model.block)
    HELD["helper"] = helper
    reference = weakref.ref(helper)
    model.lookup = lambda features: reference()(features)  # type: ignore[misc, method-assign]


def _in_globals(kind: type[Reaching]) -> Callable[[Reaching], None]:
    def way(model: Reaching) -> None:
        model.__class__ = kind
        HELD["module"] = Registry.held = model.block
        ReadsItsClass.shared[:] = [model.block.ebc]

    return way


FIXED: dict[str, tuple[Callable[[Reaching], None], str]] = {
    "global": (_in_globals(ReadsGlobal), r"global 'HELD', which ReadsGlobal\.forward reads"),
    "function_of_the_module": (_in_globals(CallsGlobalFunction), r"global 'HELD', which _held_lookup reads"),
    "another_class": (_in_globals(ReadsRegistry), r"global 'Registry\.held'"),
    "its_own_class": (_in_globals(ReadsItsClass), r"attribute 'shared' of the class ReadsItsClass"),
    "closure_of_the_class": (_local_class, r"Local\.forward -> closure variable 'module'"),
    "default_of_the_class": (_class_with_a_default, r"Local\.forward -> default argument"),
    "generator": (_generator, r"Reaching\.lookup -> bound to: a generator"),
    "iterator": (_iterator, r"Reaching\.lookup -> closure variable 'held': a list_iterator"),
    "weakly_held_helper": (_weakly_held_helper, r"'reference': a weak reference to a Helper"),
}


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("sample", [False, True], ids=["unchecked", "sample"])
@pytest.mark.parametrize("way", FIXED)
def test_what_cannot_be_replaced_is_refused_by_name(way: str, sample: bool, inplace: bool) -> None:
    make, says = FIXED[way]
    model, features = Reaching(make), batch(5)
    before = model(features)
    with pytest.raises(recfx.ConversionError, match=says) as caught:
        recfx.convert(model, (features,) if sample else None, inplace=inplace)
    assert (caught.value.reason, caught.value.module_path) == ("bypassed_collection", "block.ebc")
    assert isinstance(model.block.ebc, EmbeddingBagCollection)
    torch.testing.assert_close(model(features), before)
    (found,) = recfx.explain(model).collections
    assert (found.status, found.reason) == ("refused", "bypassed_collection")
    kept = recfx.convert(model, inplace=inplace, on_unsupported="keep")
    assert isinstance(kept.block.ebc, EmbeddingBagCollection)
    assert not recfx.explain(kept).ok


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("target", TARGETS)
def test_with_a_sample_the_calls_are_counted(target: str, inplace: bool) -> None:
    """Where nothing can be found by looking: the value of a context variable is in no object that Python shows."""
    model = Reaching(_in_globals(ReadsContext))
    HELD_IN_CONTEXT.set(TARGETS[target](model))
    with pytest.raises(recfx.ConversionError, match="calls the original collection") as caught:
        recfx.convert(model, (batch(5),), inplace=inplace)
    assert (caught.value.reason, caught.value.module_path) == ("bypassed_collection", "block.ebc")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(model.block.ebc, EmbeddingBagCollection)


@pytest.mark.parametrize("target", TARGETS)
def test_verify_sees_what_was_put_back_later(target: str) -> None:
    model, features = Reaching(lambda model: setattr(model, "lookup", Helper(TARGETS[target](model)))), batch(5)
    converted = recfx.convert(model, (features,))
    assert recfx.verify(model, converted, (features,)).ok
    converted.lookup = Helper(Helper(TARGETS[target](model)))
    report = recfx.verify(model, converted, (features,))
    wrong = [check for check in report.of("different") if check.what == "calls"]
    assert {(check.mode, check.where) for check in wrong} == {("train", "block.ebc"), ("eval", "block.ebc")}
    assert "reaches the original's modules through Reaching.lookup.module.module" in wrong[0].message


def test_a_collection_that_one_mode_alone_goes_around() -> None:
    class InEval(Reaching):
        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            found = self.block if self.training else HELD_IN_CONTEXT.get()
            return self.over(found(features).values())

    model = Reaching(lambda model: setattr(model, "__class__", InEval))
    HELD_IN_CONTEXT.set(model.block)
    with pytest.raises(recfx.ConversionError, match="calls the original") as caught:
        recfx.convert(model, (batch(5),))
    assert caught.value.reason == "bypassed_collection"


# What code reads without calling the collection: a sample tells


class Application:
    """Something global that many models' code reads: it holds the model, and counts."""

    model: nn.Module | None = None
    steps = 0


APPLICATION = Application()


class CountsSteps(nn.Module):
    """Reads a global that leads to the model, and calls nothing there, which its source does not show."""

    instances: list[nn.Module] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()
        self.over = nn.Linear(24, 1)
        self.instances.append(self)
        APPLICATION.model = self

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        APPLICATION.steps += sum(each.training for each in self.instances)
        return self.over(self.ebc(features).values())


@pytest.fixture
def counts_steps() -> Iterator[CountsSteps]:
    yield CountsSteps()
    CountsSteps.instances.clear()
    APPLICATION.model = None


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_what_code_reads_and_does_not_call_is_cleared_by_a_sample(counts_steps: CountsSteps, inplace: bool) -> None:
    features = batch(5)
    before = counts_steps(features)
    converted = recfx.convert(counts_steps, (features,), inplace=inplace)
    assert isinstance(converted.get_submodule("ebc"), HashEmbeddingBagCollection)
    torch.testing.assert_close(converted(features), before)
    noted = [note for note in recfx.explain(converted).reasons if note.code == "bypass_not_called"]
    assert {note.path for note in noted} == {"ebc"}
    assert "APPLICATION" in noted[0].message or "instances" in noted[0].message


@pytest.mark.parametrize("verify", [None, False], ids=["no sample", "not verified"])
def test_without_a_comparison_it_is_refused(counts_steps: CountsSteps, verify: bool | None) -> None:
    sample = None if verify is None else (batch(5),)
    with pytest.raises(recfx.ConversionError, match="is also reached by") as caught:
        recfx.convert(counts_steps, sample, verify=verify)
    assert (caught.value.reason, caught.value.module_path) == ("bypassed_collection", "ebc")
    assert isinstance(counts_steps.ebc, EmbeddingBagCollection)


def test_a_sample_that_is_compared_in_one_mode_alone_clears_nothing(counts_steps: CountsSteps) -> None:
    def only_in_eval(module: nn.Module, inputs: object) -> None:
        if module.training:
            raise RuntimeError("no training here")

    counts_steps.register_forward_pre_hook(only_in_eval)
    with pytest.raises(recfx.ConversionError) as caught:
        recfx.convert(counts_steps, (batch(5),))
    assert caught.value.reason == "bypassed_collection"
