"""Whose the state of a fused optimizer is if only the kernels can use it: the optimizer's, not one collection's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim import optimizers as placeholders

import recfx
from recfx.optim.attached import attached_optimizers
from tests.builders.batches import bags
from tests.builders.collections import one_table, tables_named
from tests.builders.optimizers import attach

ROWS = 6
# Half precision tables, whose state torch.optim keeps in half precision; and optimizers that keep nothing themselves.
kinds = pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (torch.optim.Adagrad, torch.float16),
        (torch.optim.Adam, torch.bfloat16),
        (placeholders.LAMB, torch.float32),
        (placeholders.Adagrad, torch.float16),
    ],
)


class Two(nn.Module):
    """Two collections that share their table."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = one_table(rows=ROWS).to(dtype), one_table(rows=ROWS).to(dtype)
        self.b.embedding_bags["t"].weight = self.a.embedding_bags["t"].weight


def train(model: Any, step: int, feature: str = "f") -> None:
    features = bags({feature: [(step % ROWS, (step + 1) % ROWS)]})
    (model(features).values().float() - 2).square().sum().backward()


@kinds
@pytest.mark.parametrize("first", [lambda model: model, copy.deepcopy], ids=["itself", "a copy"])
def test_collections_that_share_a_table_train_it_together(
    kind: type, dtype: torch.dtype, first: Callable[[Any], Any]
) -> None:
    """Whichever of them is called: the table has one state."""
    alone, both = Two(dtype), Two(dtype)
    for model in (alone, both):
        attach([model.a.embedding_bags["t"].weight], kind)
    alone, both = recfx.convert(alone), first(recfx.convert(both))
    for step in range(6):
        train(alone.a, step)
        train((both.a, both.b, both.b)[step % 3], step)
    assert torch.equal(alone.a.weight("t"), both.b.weight("t"))


@kinds
def test_state_outlives_what_is_attached_to_other_tables(kind: type, dtype: torch.dtype) -> None:
    """The optimizers of all tables are looked at again then."""
    models = []
    for attach_late in (False, True):
        torch.manual_seed(0)
        model = tables_named("a", "b", rows=ROWS).to(dtype)
        attach([model.embedding_bags["a"].weight], kind)
        converted: Any = recfx.convert(model)
        for step in range(6):
            if attach_late and step == 3:
                attach([converted.weight("b")], torch.optim.SGD, lr=0.0)
            features = bags({"a": [(step % ROWS, 1)], "b": [(0,)]})
            (converted(features)["a"].float() - 2).square().sum().backward()
        models.append(converted)
    assert torch.equal(models[0].weight("a"), models[1].weight("a"))


@pytest.mark.parametrize("kind", [placeholders.LAMB, placeholders.LarsSGD, placeholders.Adam])
def test_a_plain_model_trains_on_where_a_placeholder_was_attached(kind: type) -> None:
    """The placeholder cannot: its own step() raises."""
    torch.manual_seed(0)
    model = one_table(rows=ROWS)
    attach(model, kind)
    converted: Any = recfx.convert(model)
    for step in range(3):
        train(converted, step)
    back = copy.deepcopy(converted)
    plain: Any = recfx.unconvert(converted)
    weight = plain.embedding_bags["t"].weight
    (optimizer,) = attached_optimizers(weight)
    assert type(optimizer) is back.fused_optimizers()["t"].rule.dense_class
    every_row = bags({"f": [tuple(range(ROWS))]})  # dense Adam would step other rows as well
    for trained in (plain, back):
        (trained(every_row).values() - 2).square().sum().backward()
    torch.testing.assert_close(weight, back.weight("t"), rtol=1e-5, atol=1e-6)


@kinds
def test_a_hook_makes_it_dense_and_its_removal_fuses_it_again(kind: type, dtype: torch.dtype) -> None:
    """The dense optimizer goes on with the state of the fused one, and the other way round."""
    torch.manual_seed(0)
    model = one_table(rows=ROWS).to(dtype)
    attach(model, kind)
    converted: Any = recfx.convert(model)

    def state() -> dict[str, Any]:
        return converted.fused_optimizers()["t"].state

    train(converted, 0)
    hook = converted.weight("t").register_hook(lambda gradient: None)
    train(converted, 1)
    train(converted, 2)
    assert not converted.fused_optimizers()
    hook.remove()
    assert float(state()["step"]) == 3
    train(converted, 3)
    assert float(state()["step"]) == 4
    assert {value.dtype for value in state().values()} == {torch.float32}


def test_a_table_in_half_precision_that_only_others_read_steps_by_its_optimizer() -> None:
    """torch's Adam finds states in the dtype of the table there, and the fused step goes on with them."""
    weights = []
    for is_converted in (False, True):
        torch.manual_seed(0)
        model: Any = one_table(rows=ROWS).to(torch.bfloat16)
        attach(model, torch.optim.Adam)
        model = recfx.convert(model) if is_converted else model
        weight = model.embedding_bags["t"].weight
        for step in range(4):
            outputs = [weight.float().sum()] if step % 2 else [model(bags({"f": [tuple(range(ROWS))]})).values()]
            sum(output.float().square().sum() for output in outputs).backward()
        weights.append(weight.detach())
    torch.testing.assert_close(*weights, rtol=2e-2, atol=2e-2)
