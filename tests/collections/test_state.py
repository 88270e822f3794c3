"""Saved states: what a plain model saved, a converted one loads, strictly; and the way back."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from tests.builders.batches import bags
from tests.builders.collections import tables_named
from tests.checkpoint.training import RAW, OnePart, TwoPart, assert_same, batch
from tests.support.refusals import refused


@pytest.mark.parametrize("damaged", ["a", "b"])
def test_a_state_with_one_damaged_index_changes_no_table(damaged: str) -> None:
    converted, other = (recfx.convert(tables_named("a", "b"), hashing=recfx.HashConfig(dense_rows=0)) for _ in range(2))
    converted(bags({"a": [[5, 6]], "b": [[7]]}))
    other(bags({"a": [[-1, -2]], "b": [[-3, -4]]}))
    state = copy.deepcopy(other.state_dict())
    row_ids = state[f"hash_indexes.{damaged}.row_ids"]
    row_ids[1] = row_ids[0]
    before = copy.deepcopy(converted.state_dict())
    with refused("duplicate_id", error=recfx.CheckpointError):
        converted.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())


EVICT = recfx.HashConfig(dense_rows=0, buckets=1, on_full="evict", admit_after=2)


def trained(model_class: type[nn.Module] = OnePart, hashing: recfx.HashConfig = RAW) -> nn.Module:
    model = recfx.convert(model_class(200), hashing=hashing)
    for number in range(2):
        with torch.no_grad():  # evicting tables are not trained without a fused optimizer
            model(batch(number))
    return model


def index_keys(model: nn.Module) -> list[str]:
    return [key for key in model.state_dict() if "hash_indexes" in key]


def copied(model: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(dict(model.state_dict()))


@pytest.mark.parametrize("hashing", [RAW, EVICT])
@pytest.mark.parametrize("wrap", [False, True])
def test_a_state_of_other_modules_leaves_the_index_alone(wrap: bool, hashing: recfx.HashConfig) -> None:
    inner = trained(TwoPart, hashing)
    model = nn.Sequential(inner) if wrap else inner
    before = copied(model)
    part = {key: torch.zeros_like(value) for key, value in before.items() if "after." in key}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys = model.load_state_dict(part, strict=False)
    assert set(index_keys(model)) < set(keys.missing_keys)
    assert keys.unexpected_keys == []
    assert_same(copied(model), {**before, **part})


def test_a_strict_load_without_weight_and_index_lists_both() -> None:
    model = trained()
    before = copied(model)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*hash_indexes\.a\.row_ids"):
        model.load_state_dict({key: value for key, value in before.items() if "after." in key})
    assert_same(copied(model), before)


@pytest.mark.parametrize("kept", ["nothing", "all_as_assigned"])
def test_averaged_weights_of_the_same_model_keep_the_index(kept: str) -> None:
    model = trained()
    before = copied(model)
    averaged = {name: value.detach() * 0.5 for name, value in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys = model.load_state_dict(averaged, strict=False, assign=kept == "all_as_assigned")
    assert sorted(keys.missing_keys) == sorted(index_keys(model))
    assert_same(copied(model), {**before, **averaged})
    model(batch(0))


def test_a_plain_models_state_empties_the_index_and_says_so() -> None:
    model, plain = trained(), OnePart(200)
    ids = len(model.first.index("a"))
    assert ids > 0
    with pytest.warns(UserWarning, match=rf"tables a: .*{ids} ids are lost.*reset\(\)"):
        assert model.load_state_dict(plain.state_dict()).missing_keys == []
    assert len(model.first.index("a")) == 0


def test_what_is_lost_is_said_once_for_all_tables(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> torch.nn.Module:
        return tables_named(*(f"t{number}" for number in range(11)))

    model = recfx.convert(build(), hashing=recfx.HashConfig.raw_ids())
    model.load_state_dict(build().state_dict())
    (message,) = caplog.messages
    assert message.startswith("tables t0..10: the state has weights but no index")
    for name in ("t0", "t1"):
        model.index(name).find_or_insert(torch.arange(3))
    with pytest.warns(UserWarning, match=r"tables t0, t1: .*6 ids are lost"):
        model.load_state_dict(build().state_dict())
    assert caplog.messages[1].startswith("tables t2..10: ")
    assert not model.index("t0").holds_ids()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("dense_rows", [0, 10])
def test_an_index_that_holds_nothing_takes_a_plain_state(
    dense_rows: int, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = trained(hashing=recfx.HashConfig(dense_rows=dense_rows, buckets=4)), OnePart(200)
    model.first.index("a").reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.load_state_dict(plain.state_dict(), strict=strict).missing_keys == []
    lost = [True for message in caplog.messages if "are lost" in message]
    assert lost == ([] if dense_rows else [True])  # where no id is a row, nobody would read it
    assert torch.equal(model.first.weight("a"), plain.first.embedding_bags["a"].weight)


def test_a_hook_of_the_index_may_still_make_its_keys() -> None:
    model, source = trained(), trained()
    source(batch(9))
    moved = copied(source)
    saved = {key: moved.pop(key) for key in index_keys(source)}
    model.first.index("a").register_load_state_dict_pre_hook(lambda module, state, *rest: state.update(saved))
    model.load_state_dict(moved, strict=False)
    assert_same(copied(model), copied(source))
