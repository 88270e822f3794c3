"""What refers to a model, or is held by it, without being a way to its collections."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.collections.pooled import HashEmbeddingBagCollection
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.discovery.reaching import Helper

HELD: dict[str, Any] = {}


class Plain(nn.Module):
    """Calls its collection, and its table by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()
        self.over = nn.Linear(24, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        direct = self.ebc.embedding_bags["t1"](torch.tensor([1, 2]), torch.tensor([0, 2]))
        return self.over(self.ebc(features).values()) + direct.sum()

    def summary(self) -> Any:
        """Reads a global that holds a model, but no forward calls it."""
        return HELD["module"]


def _everything_around(model: Plain) -> list[Any]:
    """Variables of the caller's, handles, optimizers, hooks: they hold the model, the model does not hold them."""
    HELD["module"] = model
    tracker = Helper(model)
    model.handle = model.ebc.register_forward_hook(lambda *_: setattr(tracker, "calls", tracker.calls + 1))
    model.ebc.register_forward_pre_hook(lambda *_: None)
    model.optimizer = torch.optim.Adam(model.parameters())
    model.schedule = torch.optim.lr_scheduler.StepLR(model.optimizer, 1)
    model.instances = weakref.WeakSet([model])
    model.owner = weakref.ref(model)
    model.configs = model.ebc.embedding_bag_configs()
    model.weights = {name: parameter for name, parameter in model.named_parameters()}  # noqa: C416
    model.names = ((name, "x") for name in ["a"])
    model.log = sys.stdout
    for parameter in model.parameters():
        parameter.owner = model
    return [gc.get_objects(), [model], sys._getframe(), tracker]


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_what_holds_the_model_without_being_held_is_no_matter(inplace: bool) -> None:
    model = Plain()
    around = _everything_around(model)
    converted = recfx.convert(model, inplace=inplace)
    assert isinstance(converted.ebc, HashEmbeddingBagCollection)
    assert converted.owner() is converted
    assert list(converted.instances) == [converted]
    converted(batch(3))
    assert around[-1].calls == 1  # the user's own tracker
    assert (around[-1].module is converted) == inplace


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_what_a_started_thread_runs_is_no_way_to_the_model(inplace: bool) -> None:
    """A writer that runs beside the training: the forward cannot call the thread's function by the thread."""
    model, stop = Plain(), threading.Event()

    def write(held: nn.Module, *, again: Callable[[], Any]) -> None:
        stop.wait(60)

    model.writer = threading.Thread(target=write, args=(model,), kwargs={"again": model.summary}, daemon=True)
    with pytest.raises(recfx.ConversionError, match="a Thread") as caught:  # run() would call it
        recfx.convert(model, inplace=inplace)
    assert caught.value.reason == "bypassed_collection"
    model.writer.start()
    try:
        converted = recfx.convert(model, inplace=inplace)
    finally:
        stop.set()
        model.writer.join(60)
    assert isinstance(converted.ebc, HashEmbeddingBagCollection)
    assert converted.writer is model.writer


class Asserts(Plain):
    """pytest rewrites its ``assert``: the forward then reads a module of pytest, and that holds the running test."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = super().forward(features)
        assert pooled.dim() == 2
        return pooled


@pytest.fixture
def asserting() -> Asserts:
    return Asserts()


def test_what_pytest_holds_is_no_way_to_the_model(asserting: Asserts) -> None:
    assert isinstance(recfx.convert(asserting).ebc, HashEmbeddingBagCollection)


def test_calls_of_a_table_by_itself_are_no_calls_of_the_collection() -> None:
    assert recfx.explain(recfx.convert(Plain(), (batch(4),))).ok


def test_state_that_leads_to_no_module_stays_shared() -> None:
    model, count = Plain(), [0]
    model.settings = Helper("a string")
    model.count = lambda: count.append(0)
    converted = recfx.convert(model)
    assert converted.settings is model.settings
    assert converted.count is model.count


def test_helpers_that_are_one_stay_one() -> None:
    model = Plain()
    helper = Helper(model.ebc)
    model.first, model.second, model.names = helper, [helper], {"both": (helper, model.ebc)}
    model.ebc.helper = helper
    for inplace in (False, True):
        converted = recfx.convert(model, inplace=inplace)
        assert converted.first is converted.second[0] is converted.names["both"][0] is converted.ebc.helper
        assert converted.first.module is converted.ebc is converted.names["both"][1]
        assert (converted.first is helper) == inplace


def test_the_users_own_variables_stay() -> None:
    """A lambda's variable is the caller's local one: in place, too, only the model's function changes."""
    model = Plain()
    ebc = model.ebc
    function = lambda features: ebc(features)  # noqa: E731
    model.lookup = function
    recfx.convert(model, inplace=True)
    assert isinstance(ebc, EmbeddingBagCollection)
    assert function.__closure__[0].cell_contents is ebc
    assert model.lookup is not function
