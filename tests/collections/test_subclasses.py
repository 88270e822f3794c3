"""Subclasses of the standard collection, the way back, and what the report says beside it."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx
from recfx.conversion import decide
from tests.builders.batches import one_bag
from tests.builders.collections import table
from tests.builders.models import Over
from tests.support.refusals import refused

HASHED = recfx.HashConfig(dense_rows=0)


def tables() -> list[EmbeddingBagConfig]:
    return [table("t", ["f"], rows=10, dim=4)]


class Named(EmbeddingBagCollection):
    """A method, a property, a class attribute, an attribute of its own, and an overridden method."""

    version = 3

    def __init__(self, label: str) -> None:
        super().__init__(tables())
        self.label = label
        self.register_buffer("seen", torch.tensor(7))

    def rows(self) -> int:
        return self.embedding_bags["t"].weight.shape[0]

    @property
    def title(self) -> str:
        return f"{self.label}/{self.rows()}"

    def is_weighted(self) -> bool:
        self.asked = True
        return False


class Further(Named):
    def rows(self) -> int:
        return -super().rows()


def identity(model: nn.Module) -> nn.Module:
    return model


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    "kept", [identity, copy.deepcopy, pickled, copy.copy], ids=["same", "deep", "pickle", "shallow"]
)
@pytest.mark.parametrize("hashing", [None, HASHED], ids=["adopted", "hashed"])
@pytest.mark.parametrize(("kind", "rows"), [(Named, 10), (Further, -10)])
def test_a_converted_subclass(
    kind: type[Named], rows: int, hashing: recfx.HashConfig | None, kept: Callable[[nn.Module], nn.Module]
) -> None:
    plain = kind("ads")
    converted = recfx.convert(plain, hashing=hashing)
    first = converted(one_bag(1, 2)).values()
    duplicate = kept(converted.eval())
    assert isinstance(duplicate, kind)
    assert isinstance(duplicate, recfx.HashEmbeddingBagCollection)
    assert type(duplicate) is type(converted)
    assert (duplicate.rows(), duplicate.title, duplicate.version, duplicate.label) == (rows, f"ads/{rows}", 3, "ads")
    assert duplicate.is_weighted() is False
    assert duplicate.asked
    assert int(duplicate.seen) == 7
    assert duplicate.state_dict().keys() >= plain.state_dict().keys()
    assert not duplicate.training
    assert torch.equal(duplicate(one_bag(1, 2)).values(), first)
    if hashing is None:
        torch.testing.assert_close(first, plain(one_bag(1, 2)).values(), rtol=1e-6, atol=1e-6)
    else:
        assert len(duplicate.index("t")) == 2


class Weighs(Named):
    """A method that a converted collection has as well, with other arguments."""

    def weight(self) -> float:
        return 1.0


class Tabled(Named):
    """A property where a converted collection keeps something of its own."""

    @property
    def tables(self) -> str:
        return self.label


class Runs(Named):
    """A private method, which its own methods call, of the same name as one of a converted collection's."""

    def _run(self) -> str:
        return self.label


@pytest.mark.parametrize(("kind", "name"), [(Weighs, "weight"), (Tabled, "tables"), (Runs, "_run")])
def test_a_subclass_that_defines_what_a_converted_collection_uses(kind: type[Named], name: str) -> None:
    model = nn.ModuleDict({"ebc": kind("x")})
    with refused("attribute_conflict", "ebc", match=f"'{name}'"):
        recfx.convert(model)


class ShowsOthers(EmbeddingBagCollection):
    """What it shows are not the configs that its forward reads."""

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return super().embedding_bag_configs()[::-1]


def test_a_subclass_that_shows_its_configs_in_another_order() -> None:
    plain = ShowsOthers([table("t", ["f"], rows=10, dim=4), table("u", ["g"], rows=9, dim=8)])
    batch = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
    converted = recfx.convert(plain)
    assert torch.equal(converted(batch).values(), plain(batch).values())
    assert [config.name for config in converted.embedding_bag_configs()] == ["u", "t"]
    assert torch.equal(recfx.unconvert(converted)(batch).values(), plain(batch).values())


@pytest.mark.parametrize("training", [True, False])
def test_unconvert_keeps_the_mode(training: bool) -> None:
    model = nn.Sequential(EmbeddingBagCollection(tables()), nn.Identity())
    converted = recfx.convert(model)
    converted.train(not training)
    converted[0].train(training)
    back = recfx.unconvert(converted)
    assert type(back[0]) is EmbeddingBagCollection
    assert [module.training for module in (back, *back)] == [not training, training, not training]
    assert all(module.training is training for module in back[0].modules())
    assert back[0].embedding_bags["t"].weight is model[0].embedding_bags["t"].weight


@pytest.mark.parametrize("hashing", [HASHED, recfx.HashConfig(rows=16)], ids=["hashed", "partly"])
def test_reset_parameters_empties_the_indexes(hashing: recfx.HashConfig) -> None:
    converted = recfx.convert(EmbeddingBagCollection(tables()), hashing=hashing)
    converted(one_bag(-1, 10**12))
    assert len(converted.index("t")) == 2
    before = converted.weight("t").detach().clone()
    converted.reset_parameters()
    index = converted.index("t")
    assert len(index) == 0
    assert index.find(torch.tensor([-1, 10**12])).tolist() == [-1, -1]
    assert index.counters == dict.fromkeys(index.counters, 0)
    after = converted.weight("t").detach()
    assert after.shape == before.shape
    assert bool((after != before).any(dim=1).all())
    assert float(after.abs().max()) <= 10**-0.5
    converted(one_bag(5_000_000_000))
    assert len(index) == 1


def codes(converted: nn.Module) -> list[tuple[str, str]]:
    return [(reason.code, reason.path) for reason in recfx.explain(converted).reasons]


@pytest.mark.parametrize("path", ["", "ebc"])
def test_a_dropped_compilation_is_reported(path: str) -> None:
    model = Over(EmbeddingBagCollection(tables()), 4)
    model.get_submodule(path).compile(backend="eager")
    converted = recfx.convert(model)
    assert codes(converted) == [("compile_dropped", path)]
    assert ".compile()" in recfx.explain(converted).reasons[0].what_to_do
    assert codes(recfx.convert(Over(EmbeddingBagCollection(tables()), 4))) == []


def test_a_model_too_large_to_verify_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Over(EmbeddingBagCollection(tables()), 4)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    monkeypatch.setattr(decide, "MOST_BYTES_VERIFIED", size)
    assert codes(recfx.convert(model, (one_bag(1),))) == []
    monkeypatch.setattr(decide, "MOST_BYTES_VERIFIED", size - 1)
    converted = recfx.convert(model, (one_bag(1),))
    assert codes(converted) == [("verification_skipped", "")]
    assert recfx.explain(converted).ok
    assert codes(recfx.convert(model, (one_bag(1),), verify=True)) == []  # asked for
    assert codes(recfx.convert(model, (one_bag(1),), verify=False)) == []
    assert codes(recfx.convert(model)) == []
