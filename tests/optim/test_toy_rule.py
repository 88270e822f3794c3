"""A rule that is one file and one line trains, saves and loads everywhere: unsharded, hashed and sharded."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.optim.attached import attached_optimizers
from tests.builders.collections import one_table
from tests.builders.optimizers import attach
from tests.sharding.cases import OPTIMIZERS, Case
from tests.sharding.ranks import ranks
from tests.sharding.stateful import LRU, assert_same, case_of, make, train, whole_state
from tests.toys import sign_sgd
from tests.toys.sign_sgd import SIGN_SGD, SignSGD, registered

ROWS, DIM = 16, 4
SETTINGS = {"lr": 0.5, "floor": 0.25}
RAW = recfx.HashConfig(dense_rows=0, rows=ROWS, buckets=1)


@pytest.fixture
def _toy() -> Iterator[None]:
    with registered(SIGN_SGD):
        yield


def collection() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    made = one_table(["f", "g"], rows=ROWS, dim=DIM)
    attach(made, SignSGD, **SETTINGS)
    return made


def batch(step: int, ids: torch.Tensor) -> KeyedJaggedTensor:
    """Some of ``ids``, some of them twice."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (10,), generator=generator)
    chosen = torch.randint(0, ids.numel(), (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["f", "g"], ids[chosen], lengths=lengths)


def steps(model: nn.Module, ids: torch.Tensor, first: int = 0, last: int = 3) -> None:
    for step in range(first, last):
        values = model(batch(step, ids)).values()
        (values - torch.linspace(-1, 2, values.numel()).view_as(values)).square().sum().backward()


def dense_state(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of a standard collection, and what its optimizer has seen."""
    (weight,) = model.parameters()
    (optimizer,) = attached_optimizers(weight)
    return weight.detach(), optimizer.state[weight]["seen"]


def fused_state(model: recfx.HashEmbeddingBagCollection) -> tuple[torch.Tensor, torch.Tensor]:
    saved = model.fused_optimizer.state_dict()["state"]
    return model.weight("t").detach(), saved["embedding_bags.t.weight"]["t.momentum1"]


@pytest.mark.usefixtures("_toy")
@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(), RAW], ids=["static", "adopted", "hashed"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_three_steps_are_the_dense_rule(hashing: recfx.HashConfig | None, backend: str) -> None:
    dense = collection()
    converted: Any = recfx.convert(collection(), hashing=hashing, backend=backend)
    ids, rows = torch.arange(ROWS), torch.arange(ROWS)
    if hashing is RAW:
        ids = torch.arange(ROWS) * 2**57 - 3
        rows = converted.index("t").find_or_insert(ids)
        next(dense.parameters()).data.copy_(converted.weight("t").detach())
    steps(dense, rows)
    steps(converted, ids)
    assert converted.weight("t").grad is None
    for actual, expected in zip(fused_state(converted), dense_state(dense), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_toy")
def test_saved_and_loaded(tmp_path: Path) -> None:
    ids = torch.arange(ROWS)
    trained, loaded, keyed = (recfx.convert(collection()) for _ in range(3))
    steps(trained, ids)
    recfx.save_checkpoint(trained, tmp_path / "checkpoint")
    recfx.load_checkpoint(loaded, tmp_path / "checkpoint")
    keyed.load_state_dict(trained.state_dict())
    keyed.fused_optimizer.load_state_dict(trained.fused_optimizer.state_dict())
    pickled = pickle.loads(pickle.dumps(trained))
    for model in (trained, loaded, keyed, pickled):
        steps(model, ids, 3, 5)
        for actual, expected in zip(fused_state(model), fused_state(trained), strict=True):
            assert torch.equal(actual, expected)


class SignSGDWithOption(SignSGD):
    """Has an argument that no other optimizer has, and that is no setting of the rule."""

    def __init__(self, params: Any, lr: float = 0.1, floor: float = 1.0, upside_down: bool = False) -> None:
        super().__init__(params, lr, floor)
        self.param_groups[0]["upside_down"] = upside_down


def test_a_rule_names_the_values_at_which_an_argument_of_its_class_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = replace(SIGN_SGD, dense_class=SignSGDWithOption, neutral={"upside_down": (False,)})
    monkeypatch.setattr(sign_sgd, "SIGN_SGD", rule)
    dense, refused = collection(), collection()
    for made, upside_down in ((dense, False), (refused, True)):
        made.embedding_bags["t"].weight = nn.Parameter(made.embedding_bags["t"].weight.detach())
        attach(made, SignSGDWithOption, upside_down=upside_down, **SETTINGS)
    with registered(rule):
        converted: Any = recfx.convert(dense)
        (table,) = recfx.explain(converted).collections[0].tables
        assert table.optimizer == "fused sign_sgd"
        with pytest.raises(recfx.ConversionError, match=r"SignSGDWithOption\(upside_down=True\) has no fused form"):
            recfx.convert(refused)
        (optimizer,) = attached_optimizers(converted.weight("t"))
        optimizer.param_groups[0]["upside_down"] = True
        with pytest.raises(recfx.ConversionError, match="was given upside_down=True after the conversion"):
            steps(converted, torch.arange(ROWS))


def train_and_reload(rank: int, world_size: int, case: Case) -> list[dict[str, torch.Tensor]]:
    """The state after three steps; after two more; and after those of a model that loaded the state of three."""
    with registered(SIGN_SGD), mock.patch.dict(OPTIMIZERS, sign_sgd=(SignSGD, dict(SETTINGS))):
        model, loaded = (make(case, world_size, seed) for seed in (0, 5))
        train(model, case, rank, world_size, 0, 3)
        states = [whole_state(model)]
        sparse: Any = model.get_submodule("sparse")
        sparse_again: Any = loaded.get_submodule("sparse")
        sparse_again.load_state_dict(copy.deepcopy(sparse.state_dict()))
        sparse_again.fused_optimizer.load_state_dict(copy.deepcopy(sparse.fused_optimizer.state_dict()))
        for trained in (model, loaded):
            train(trained, case, rank, world_size, 3, 5)
            states.append(whole_state(trained))
        return states


@pytest.mark.parametrize("hashing", [None, LRU], ids=["static", "hashed"])
def test_sharded(hashing: recfx.HashConfig | None) -> None:
    case = case_of("mixed", hashing, "sign_sgd")
    answers = ranks(2).run(train_and_reload, case)
    with registered(SIGN_SGD), mock.patch.dict(OPTIMIZERS, sign_sgd=(SignSGD, dict(SETTINGS))):
        whole = make(case, 0)
        train(whole, case, 0, 0, 0, 3)
        expected = whole_state(whole)
    assert any(name.endswith("a.momentum1") for name in expected)
    for after_three, after_five, reloaded in answers:
        assert_same(after_three, expected, exact=False)
        assert_same(reloaded, after_five)
