"""Tables that one call could serve, but for the settings of their optimizers: each is trained with its own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.conversion.convert import convert
from recfx.runtime.lookup import Lookup
from tests.builders.collections import table
from tests.builders.optimizers import attach

ROWS = 5
BASE: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "weight_decay": 0.0},
    "adagrad": {"lr": 0.1, "eps": 1e-2, "weight_decay": 0.0},
    "rowwise_adagrad": {"lr": 0.1, "eps": 1e-2},
    "adam": {"lr": 0.1, "eps": 1e-2, "betas": (0.9, 0.99)},
}
OTHER = {"lr": 0.4, "eps": 1.0, "betas": (0.5, 0.6), "weight_decay": 0.3}
CASES = [(kind, name) for kind, settings in BASE.items() for name in settings]
CHANGED_LATER = [case for case in CASES if case[1] != "weight_decay"]
"""Decay that is switched on later is refused."""


def three_tables() -> EmbeddingBagCollection:
    """All SUM, of one dtype and one width: one call serves them where their settings are the same."""
    return EmbeddingBagCollection([table(f"t{i}", [f"f{i}"], dim=4, rows=ROWS) for i in range(3)])


def every_row() -> KeyedJaggedTensor:
    """Two bags a feature with all rows among them: the dense rules move the same rows as the fused ones."""
    ids = torch.cat([torch.arange(ROWS) for _ in range(3)])
    return KeyedJaggedTensor(["f0", "f1", "f2"], ids, lengths=torch.tensor([2, ROWS - 2] * 3))


def train(model: nn.Module) -> None:
    values = model(every_row()).values()
    (values - torch.linspace(-1, 1, values.numel()).view_as(values)).square().sum().backward()


def calls_of(model: HashEmbeddingBagCollection) -> int:
    return sum(isinstance(module, Lookup) for module in model.graph_module.modules())


def compare(plain: nn.Module, converted: nn.Module, between: Callable[[nn.Module], None] | None = None) -> None:
    for step in range(4):
        for one in (plain, converted):
            if step == 2 and between is not None:
                between(one)
            train(one)
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(converted.state_dict()[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_different_when_converted(kind: str, name: str) -> None:
    plain = three_tables()
    model = copy.deepcopy(plain)
    for one in (plain, model):
        for position, parameter in enumerate(one.parameters()):
            changed = {name: OTHER[name]} if position == 1 else {}
            attach([parameter], kind, **{**BASE[kind], **changed})
    converted = convert(model)
    compare(plain, converted)
    assert calls_of(converted) == 2


@pytest.mark.parametrize(("kind", "name"), CHANGED_LATER)
def test_changed_later_for_one_table(kind: str, name: str) -> None:
    """Of the second table of three that one call serves."""
    plain = three_tables()
    model = copy.deepcopy(plain)
    for one in (plain, model):
        attach(one, kind, **BASE[kind])
    converted = convert(model)
    assert calls_of(converted) == 1

    def change(one: nn.Module) -> None:
        parameter = list(one.parameters())[1]
        parameter._in_backward_optimizers[0].param_groups[0][name] = OTHER[name]

    compare(plain, converted, change)
