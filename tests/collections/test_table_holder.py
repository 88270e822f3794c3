"""What is put on the ``nn.EmbeddingBag`` of a converted table is refused where it would be ignored."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import recfx
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.support.refusals import refused


def change(name: str, value: Any) -> Callable[[nn.EmbeddingBag], object]:
    return lambda bag: setattr(bag, name, value)


CHANGES: dict[str, Callable[[nn.EmbeddingBag], object]] = {
    "max_norm": change("max_norm", 0.1),
    "mode": change("mode", "max"),
    "padding_idx": change("padding_idx", 1),
    "scale_grad_by_freq": change("scale_grad_by_freq", True),
    "sparse": change("sparse", True),
    "forward": change("forward", lambda *arguments: None),
    "forward_hook": lambda bag: bag.register_forward_hook(lambda *arguments: None),
    "forward_pre_hook": lambda bag: bag.register_forward_pre_hook(lambda *arguments: None),
    "backward_hook": lambda bag: bag.register_full_backward_hook(lambda *arguments: None),
    "backward_pre_hook": lambda bag: bag.register_full_backward_pre_hook(lambda *arguments: None),
    "parametrization": lambda bag: parametrize.register_parametrization(bag, "weight", nn.Tanh()),
    "weight norm": lambda bag: parametrizations.weight_norm(bag),
    "old spectral norm": lambda bag: torch.nn.utils.spectral_norm(bag),
    "pruning": lambda bag: prune.l1_unstructured(bag, "weight", 0.5),
    "deleted": lambda bag: delattr(bag, "weight"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_conversion_is_refused_and_changes_nothing(name: str) -> None:
    converted = recfx.convert(collection())
    features = batch(4)
    before, state = converted(features).values(), dict(converted.state_dict())
    with pytest.raises(recfx.ConversionError) as caught:
        CHANGES[name](converted.embedding_bags["t1"])
    assert caught.value.reason in ("unsupported_bag", "unsupported_bag_option")
    assert torch.equal(converted(features).values(), before)
    assert converted.state_dict().keys() == state.keys()


def test_a_weight_that_was_taken_away_behind_the_module_is_missed_at_the_next_forward() -> None:
    converted = recfx.convert(collection())
    del converted.embedding_bags["t1"]._parameters["weight"]
    with refused("unsupported_bag", match="'t1' has no parameter"):
        converted(batch(4))
    with refused("unsupported_bag", match="'t1' is missing"):
        converted.embedding_bags = nn.ModuleDict()


@pytest.mark.parametrize(
    ("options", "reason"), [({"max_norm": 0.1}, "unsupported_bag_option"), ({"mode": "max"}, "unsupported_bag")]
)
def test_another_bag_with_such_a_setting_is_refused_at_the_next_forward(options: Any, reason: str) -> None:
    converted = recfx.convert(collection())
    settings = {"mode": "sum", "include_last_offset": True} | options
    converted.embedding_bags["t1"] = nn.EmbeddingBag(20, 8, **settings)
    with refused(reason, match="'t1'"):
        converted(batch(4))


def test_another_plain_bag_is_looked_up_and_held_too() -> None:
    plain = collection()
    converted = recfx.convert(copy.deepcopy(plain))
    torch.manual_seed(3)
    bag = nn.EmbeddingBag(20, 8, mode="sum", include_last_offset=True)
    plain.embedding_bags["t1"] = copy.deepcopy(bag)
    converted.embedding_bags["t1"] = bag
    features = batch(4)
    torch.testing.assert_close(converted(features).values(), plain(features).values(), rtol=1e-5, atol=1e-6)
    with pytest.raises(recfx.ConversionError):
        bag.max_norm = 1.0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_refuse_as_well_and_the_original_never_did(copied: Callable[[Any], Any]) -> None:
    plain = collection()
    converted = copied(recfx.convert(plain))
    with pytest.raises(recfx.ConversionError):
        converted.embedding_bags["t1"].max_norm = 1.0
    plain.embedding_bags["t1"].max_norm = 1.0
    assert repr(converted.embedding_bags["t1"]).startswith("EmbeddingBag(20, 8")


def test_what_changes_nothing_is_let_through() -> None:
    converted = recfx.convert(collection())
    bag = converted.embedding_bags["t1"]
    bag.mode, bag.max_norm = bag.mode, None
    bag.train(False)
    bag.weight = nn.Parameter(torch.ones(20, 8))
    assert converted(batch(4)).values()[:, :8].sum() > 0


@pytest.mark.parametrize("shape", [(160,), (), (2, 10, 8)], ids=str)
def test_a_weight_that_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    standard = collection()
    standard.embedding_bags["t1"].weight = nn.Parameter(torch.zeros(shape))
    with refused("unsupported_bag", match="dimensions"):
        recfx.convert(standard)


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_a_table_with_its_own_forward_is_refused(inplace: bool) -> None:
    standard = collection()
    bag = standard.embedding_bags["t1"]
    bag.forward = functools.partial(bag.forward)  # type: ignore[method-assign]
    with refused("unsupported_bag"):
        recfx.convert(standard, inplace=inplace)
