"""Tables that one call could serve, but for the settings of their optimizers: each is trained with its own."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

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


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_different_when_converted(kind: str, name: str) -> None:
    plain = three_tables()
    model = copy.deepcopy(plain)
    for one in (plain, model):
        for position, parameter in enumerate(one.parameters()):
            changed = {name: OTHER[name]} if position == 1 else {}
            attach([parameter], kind, **{**BASE[kind], **changed})
    converted = convert(model)
    for _ in range(4):
        train(plain)
        train(converted)
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(converted.state_dict()[key], expected, rtol=1e-5, atol=1e-6)
    assert sum(isinstance(module, Lookup) for module in converted.graph_module.modules()) == 2
