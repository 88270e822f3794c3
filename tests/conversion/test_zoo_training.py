"""Every model with sequence tables, and some without: trained, saved, copied, on raw ids, and taken back."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from recfx.collections.converted_collection import converted_collections
from recfx.collections.kinds import kind_of
from recfx.models.conversion_record import conversion_of
from recfx.models.sample import Sample
from tests.builders.optimizers import attach
from tests.models import SEQUENCES, ZOO, Case
from tests.models.case import assert_agree, run, standard_collections
from tests.support.refusals import refused

POOLED = ("tower", "tied_weight", "called_twice", "frozen_table")
CASES = [*SEQUENCES, *(case for case in ZOO if case.name in POOLED)]
each_model = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
RAW = recfx.HashConfig(dense_rows=0)


def with_one_of(name: str, values: list[Any]) -> pytest.MarkDecorator:
    """Each model with two of the values in turn."""
    cases = [(case, values[(n + m) % len(values)]) for n, case in enumerate(CASES) for m in (0, 1)]
    return pytest.mark.parametrize(("case", name), cases, ids=lambda one: getattr(one, "name", None))


ROUNDED = {"sequence_half": 1e-2}  # each step rounds to half precision, and not at the same places
STEPS = 3


def tables_of(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all tables, each once."""
    weights = [
        weight
        for collection in standard_collections(model)
        for weight in kind_of(collection).tables_of(collection).parameters()
    ]
    return list({id(weight): weight for weight in weights if weight.requires_grad}.values())


def assert_same_weights(expected: nn.Module, actual: nn.Module, case: Case) -> None:
    tolerance = ROUNDED.get(case.name, 1e-5)
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], weight, rtol=tolerance, atol=tolerance)


@with_one_of("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_steps_of_fused_optimizers(case: Case, kind: str) -> None:
    """One step a backward for each weight, however many read it; one batch, so that dense Adam moves the same rows."""
    reference, model = case.model(), case.model()
    start = copy.deepcopy(reference.state_dict())
    for one in (reference, model):
        attach(tables_of(one), kind)
    converted = recfx.convert(model, verify=False)
    for _ in range(STEPS):
        for one in (reference, converted):
            run(one, case.sample(), backward=True)
    assert_same_weights(reference, converted, case)
    assert any(not torch.equal(start[name], value) for name, value in converted.state_dict().items())
    fused = [
        table for collection in converted_collections(converted).values() for table in collection.fused_optimizers()
    ]
    assert len(fused) >= len(tables_of(reference))


@with_one_of("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_steps_of_ordinary_optimizers(case: Case, optimizer: type[torch.optim.Optimizer]) -> None:
    reference, model = case.model(), case.model()
    converted = recfx.convert(model, verify=False)
    settings = {} if optimizer is torch.optim.SGD else {"eps": 1e-2}  # the default is zero in half precision
    optimizers = [optimizer(one.parameters(), lr=0.1, **settings) for one in (reference, converted)]
    for batch_size in (4, 7, 5):
        for one, stepper in zip((reference, converted), optimizers, strict=True):
            run(one, case.sample(batch_size), backward=True)
            stepper.step()
    assert_same_weights(reference, converted, case)


@each_model
def test_states_load_both_ways_and_copies_are_independent(case: Case) -> None:
    reference, converted = case.model(), recfx.convert(case.model(), verify=False)
    assert list(converted.state_dict()) == list(reference.state_dict())
    other = {name: value * 2 if value.is_floating_point() else value for name, value in reference.state_dict().items()}
    converted.load_state_dict(other, strict=True)
    reference.load_state_dict(converted.state_dict(), strict=True)
    assert_agree(reference, converted, case)
    for copied in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        before = copy.deepcopy(converted.state_dict())
        with torch.no_grad():
            for weight in copied.parameters():
                weight.zero_()
        assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())


@each_model
def test_unconverted_it_is_the_standard_model(case: Case) -> None:
    reference = case.model()
    plain = recfx.unconvert(recfx.convert(case.model(), verify=False))
    assert [type(collection) for collection in standard_collections(plain)] == [
        type(collection) for collection in standard_collections(reference)
    ]
    assert not converted_collections(plain)
    assert_agree(reference, plain, case)


def with_raw_ids(value: Any) -> Any:
    """A call like this one, with ids that are no rows."""
    if not isinstance(value, KeyedJaggedTensor):
        return value
    factor = 2**40 if value.values().dtype == torch.int64 else 2**20
    raw = copy.copy(value)
    raw._values = value.values() * factor - 10 * factor
    return raw


@each_model
def test_raw_ids(case: Case) -> None:
    """Verification maps the ids through the index, and gives rows to the standard model."""
    call = case.sample()
    sample = Sample(
        *map(with_raw_ids, call.args), **{name: with_raw_ids(argument) for name, argument in call.kwargs.items()}
    )
    original = case.model()
    if case.name == "sequence_tied_to_pooled":
        with refused("tied_tables"):
            recfx.convert(original, sample, hashing=RAW)
        return
    converted = recfx.convert(original, sample, hashing=RAW)
    verification = conversion_of(converted).verification
    assert verification is not None
    assert verification.ok
    for _ in range(2):  # the ids that are there, and their rows, do not change
        run(converted.train(), sample, backward=False)
        assert recfx.verify(original, converted, sample).ok
    for collection in converted_collections(converted).values():
        for table in collection.tables:
            ids, rows = collection.index(table.name).items()
            assert ids.numel() == rows.unique().numel() > 0
            assert ids.abs().max() > 2**20
