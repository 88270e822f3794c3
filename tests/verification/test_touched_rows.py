"""Rows that a batch did not touch: dense rules move them, fused ones do not, and ``verify`` compares the others."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.models.verify_report import DIFFERENT
from tests.builders.batches import two_bags
from tests.builders.collections import one_table
from tests.builders.models import Pooled
from tests.builders.optimizers import attach

TABLE = "ebc.embedding_bags.t.weight"
MOVE_OTHERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.5}),
}


def trained(kind: str, hashing: recfx.HashConfig | None) -> tuple[nn.Module, nn.Module]:
    """A model whose optimizer has moments for rows that the sample does not read, and its conversion."""
    model = Pooled(one_table())
    optimizer, settings = MOVE_OTHERS[kind]
    attach(model, optimizer, **settings)
    if hashing is None:
        model(two_bags(1, 2, 7)).square().sum().backward()
    converted = recfx.convert(model, hashing=hashing)
    if hashing is not None:
        converted(two_bags(1, 2, 7)).square().sum().backward()
    return model, converted


@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(dense_rows=0)], ids=["adopted", "hashed"])
@pytest.mark.parametrize("kind", MOVE_OTHERS)
def test_they_may_differ(kind: str, hashing: recfx.HashConfig | None) -> None:
    model, converted = trained(kind, hashing)
    report = recfx.verify(model, converted, (two_bags(2, 3, 5),))
    assert report.ok, [str(check) for check in report.of(DIFFERENT)]


@pytest.mark.parametrize("kind", MOVE_OTHERS)
def test_touched_ones_must_not(kind: str) -> None:
    model, converted = trained(kind, None)
    wrong = copy.deepcopy(converted)
    wrong.ebc.fused_optimizers()["t"].group["lr"] = 0.2
    report = recfx.verify(model, wrong, (two_bags(2, 3, 5),))
    assert {(check.what, check.where) for check in report.of(DIFFERENT)} == {("parameters", TABLE)}


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.Adagrad])
def test_others_must_not_either_where_the_dense_rule_leaves_them_alone(
    optimizer: type[torch.optim.Optimizer] | None,
) -> None:
    model = Pooled(one_table())
    if optimizer is not None:
        attach(model, optimizer, lr=0.1)
    wrong = copy.deepcopy(recfx.convert(model))
    with torch.no_grad():
        wrong.ebc.weight("t")[9] += 1.0
    report = recfx.verify(model, wrong, (two_bags(2, 3, 5),))
    assert {(check.what, check.where) for check in report.of(DIFFERENT)} == {("parameters", TABLE)}


@pytest.mark.parametrize("trains", [True, False])
def test_a_frozen_hashed_table_has_no_gradient_in_the_oracle(trains: bool) -> None:
    model = Pooled(one_table()).requires_grad_(trains)
    converted = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0))
    report = recfx.verify(model, converted, (two_bags(2, 3, 5),))
    assert report.ok
    assert any(check.what == "gradients" for check in report.checks) == trains
    plain = recfx.unconvert(converted, with_mapping=True)[0]
    assert plain.ebc.embedding_bags["t"].weight.requires_grad == trains
