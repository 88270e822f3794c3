"""``load_state_dict`` of a damaged index anywhere in a converted model changes nothing anywhere in it."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.collections.collection import unsharded_collections
from tests.checkpoint.training import RAW, TwoPart, assert_same, batch, collection
from tests.support.refusals import refused

State = dict[str, Any]


class Sum(TwoPart):
    """Without the buffer, which a whole graph cannot count up."""

    def __init__(self) -> None:
        super().__init__(200)
        del self.seen
        self.seen = torch.zeros(())

    def forward(self, features: Any) -> torch.Tensor:
        pooled = torch.cat([self.before(self.first(features).values()), self.second(features).values()], dim=1)
        return self.after(pooled).squeeze(1)


def trained(first: int, **arguments: Any) -> nn.Module:
    model = recfx.convert(Sum(), hashing=RAW, **arguments)
    for number in range(first, first + 3):
        model(batch(number))
    return model


def state_of(model: nn.Module) -> State:
    """All that is saved and all that is derived, copied."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for path, converted in unsharded_collections(model).items():
        for table in converted.hash_indexes:
            state.update(
                {f"{path}.{table}.{key}": value.clone() for key, value in converted.index(table)._buffers.items()}
            )
    return state


def damaged(model: nn.Module, prefix: str = "") -> State:
    state = {prefix + name: value.clone() for name, value in model.state_dict().items()}
    ids = state[f"{prefix}second.hash_indexes.c.row_ids"]
    rows = torch.nonzero(ids >= 0).squeeze(1)
    ids[rows[0]] = ids[rows[1]]
    return state


def reloaded(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def in_place() -> nn.Module:
    model = Sum()
    recfx.convert(model, hashing=RAW, inplace=True)
    return model


def whole_graph() -> nn.Module:
    return recfx.convert(Sum(), (batch(0),), hashing=RAW, whole_graph=True)


def built_by_hand() -> nn.Module:
    """Collections that were never converted: converting again is a no-op that puts the guard up."""
    model = Sum()
    for name, tables in (("first", "ab"), ("second", "c")):
        configs = collection(list(tables), 200).embedding_bag_configs()
        hashed = [recfx.HashEmbeddingBagConfig(**{**vars(config), "hashing": RAW}) for config in configs]
        setattr(model, name, recfx.HashEmbeddingBagCollection(hashed))
    assert recfx.convert(model) is model
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "copies": lambda: trained(7),
    "in_place": in_place,
    "whole_graph": whole_graph,
    "built_by_hand": built_by_hand,
    "deepcopy": lambda: copy.deepcopy(trained(7)),
    "pickle": lambda: reloaded(trained(7)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_model_is_as_it_was(name: str) -> None:
    model = MODELS[name]()
    before = state_of(model)
    with pytest.raises(recfx.CheckpointError) as caught:
        model.load_state_dict(damaged(trained(0)))
    assert caught.value.reason in ("duplicate_id", "wrong_bucket")
    assert_same(state_of(model), before)
    source = trained(0)
    model.load_state_dict(copy.deepcopy(source.state_dict()))
    assert_same(dict(model.state_dict()), dict(source.state_dict()))


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "compiled": (lambda model: torch.compile(model, backend="eager"), "_orig_mod."),
    "converted_bigger": (lambda model: recfx.convert(nn.Sequential(nn.Linear(2, 2), model)), "1."),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models(name: str) -> None:
    wrap, prefix = WRAPPERS[name]
    model = wrap(trained(7))
    before = state_of(model)
    other = {f"0.{key}": torch.zeros_like(value) for key, value in nn.Linear(2, 2).state_dict().items()}
    state = {**(other if name == "converted_bigger" else {}), **damaged(trained(0), prefix)}
    with pytest.raises(recfx.CheckpointError):
        model.load_state_dict(state)
    assert_same(state_of(model), before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state.update({"second.embedding_bags.c.weight": torch.zeros(199, 4)}), "torn_state"),
        (lambda state: state.update({"second.embedding_bags.c.weight": torch.zeros(200, 3)}), "columns_mismatch"),
        (lambda state: state.pop("second.hash_indexes.c.row_state"), "torn_state"),
        (lambda state: state.pop("second.embedding_bags.c.weight"), "torn_state"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_an_index_without_its_weight(change: Callable[[State], object], reason: str, strict: bool) -> None:
    model = trained(7)
    before = state_of(model)
    state = copy.deepcopy(dict(trained(0).state_dict()))
    change(state)
    with refused(reason, "c", error=recfx.CheckpointError):
        model.load_state_dict(state, strict=strict)
    assert_same(state_of(model), before)


@pytest.mark.parametrize("place", ["root", "collection"])
def test_a_users_hook_may_still_rename_keys(place: str) -> None:
    model, source = trained(7), trained(0)
    owner = {"root": model, "collection": model.first}[place]
    key = "first.hash_indexes.a.row_ids"

    def rename(module: nn.Module, state: State, prefix: str, *rest: Any) -> None:
        for name in [name for name in state if name.endswith("old_ids")]:
            state[name.replace("old_ids", "row_ids")] = state.pop(name)

    owner.register_load_state_dict_pre_hook(rename)
    state = copy.deepcopy(dict(source.state_dict()))
    state[key.replace("row_ids", "old_ids")] = state.pop(key)
    model.load_state_dict(state)
    assert_same(dict(model.state_dict()), dict(source.state_dict()))
