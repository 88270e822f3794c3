"""A standard collection and its conversion, each with optimizers in backward, trained side by side."""

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.conversion.convert import convert
from tests.builders.collections import collection, table
from tests.builders.optimizers import attach


def standard(kind: str) -> EmbeddingBagCollection:
    return collection() if kind == "two_tables" else EmbeddingBagCollection(
        tables=[table("t1", ["f1"], dim=4), table("t2", ["f2", "f1"], dim=6), table("t3", ["f3"], dim=4)]
    )  # fmt: skip


def fused_pair(
    kind: str | type[torch.optim.Optimizer], backend: str, tables: str, **more: Any
) -> tuple[nn.Module, nn.Module]:
    """A standard collection with the dense torch rule in backward, and its conversion."""
    plain = standard(tables)
    model = copy.deepcopy(plain)
    for one in (plain, model):
        # Each table its own call, as a model with several groups has it: optimizers are not shared in any case.
        attach(one, kind, **more)
    return plain, convert(model, backend=backend)


def train(one: nn.Module, features: KeyedJaggedTensor) -> None:
    values = one(features).values()
    (values - torch.linspace(-1, 1, values.numel()).view_as(values)).square().sum().backward()


def assert_alike(plain: nn.Module, converted: nn.Module) -> None:
    actual, expected = converted.state_dict(), plain.state_dict()
    torch.testing.assert_close({name: actual[name] for name in expected}, dict(expected), rtol=1e-5, atol=1e-6)


fused_kinds = pytest.mark.parametrize(
    ("kind", "backend"),
    [(kind, backend) for kind in ("sgd", "adagrad", "rowwise_adagrad") for backend in ("fbgemm", "reference")],
)
