"""Kinds of tables, and the comparison of a converted collection with the standard one."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recfx.hashing import HashConfig
from tests.builders.collections import table

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN

each_backend = pytest.mark.parametrize("backend", ["reference", "fbgemm"])
each_hashing = pytest.mark.parametrize(
    "hashing", [HashConfig(), None, HashConfig(rows=64)], ids=["dense", "static", "grown"]
)
"""Ways to adopt a table: its ids are its rows in all of them."""


Tables = Callable[[], list[EmbeddingBagConfig]]

TABLES: dict[str, Tables] = {
    "sum": lambda: [table("t1", ["f1"]), table("t2", ["f2"]), table("t3", ["f3"])],
    "mean": lambda: [table("t1", ["f1"], pooling=MEAN), table("t2", ["f2", "f3"], pooling=MEAN)],
    "sum_and_mean": lambda: [
        table("t1", ["f1"], pooling=MEAN),
        table("t2", ["f2"], pooling=SUM),
        table("t3", ["f3"], pooling=MEAN),
    ],
    "several_features": lambda: [table("t1", ["f3", "f1"]), table("t2", ["f2"])],
    "shared_features": lambda: [
        table("t1", ["f1", "f2"], dim=4),
        table("t2", ["f2"], dim=6, pooling=MEAN),
        table("t3", ["f3", "f1", "f2"], dim=8),
    ],
    "unequal_dims": lambda: [
        table("t1", ["f1"], dim=1, rows=20),
        table("t2", ["f2"], dim=7, rows=33, pooling=MEAN),
        table("t3", ["f3"], dim=64, rows=50),
    ],
    "one_table": lambda: [table("t1", ["f2"])],
    "unnamed_feature": lambda: [table("f1", [])],
    "many": lambda: [
        table(f"t{i}", [f"f{1 + i % 3}"], dim=4 + i % 3, pooling=MEAN if i % 2 else SUM) for i in range(12)
    ],
}


def standard(tables: list[EmbeddingBagConfig], is_weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


def assert_same(
    oracle: nn.Module,
    converted: nn.Module,
    features: KeyedJaggedTensor,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    expected: KeyedJaggedTensor | None = None,
) -> None:
    """Outputs, and gradients of tables and of the batch's weights; the oracle may be fed ``expected`` instead."""
    wanted_features = features if expected is None else expected
    expected_output, output = oracle(_with_own_weights(wanted_features)), converted(_with_own_weights(features))
    assert isinstance(output, KeyedTensor)
    assert output.keys() == expected_output.keys()
    assert output.length_per_key() == expected_output.length_per_key()
    torch.testing.assert_close(output.values(), expected_output.values(), rtol=rtol, atol=atol)
    gradients = [_gradients(oracle, wanted_features), _gradients(converted, features)]
    assert gradients[1].keys() == gradients[0].keys()
    for name, wanted_gradient in gradients[0].items():
        gradient = gradients[1][name]
        gradient = gradient[: wanted_gradient.shape[0]]  # a table may have grown: nothing reached its new rows
        assert not gradients[1][name][wanted_gradient.shape[0] :].any(), name
        torch.testing.assert_close(gradient, wanted_gradient, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def _with_own_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights = features.weights_or_none()
    if weights is None or features.variable_stride_per_key():
        return features
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        weights.detach().clone().requires_grad_(weights.requires_grad),
        lengths=features.lengths(),
        stride=features.stride(),
    )


def _gradients(model: nn.Module, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    features = _with_own_weights(features)
    model.zero_grad(set_to_none=True)
    values = model(features).values()
    scale = torch.linspace(-1, 2, values.numel()).view_as(values)
    (values * scale).sum().backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    weights = features.weights_or_none()
    if weights is not None and weights.grad is not None:
        gradients["per_sample_weights"] = weights.grad.clone()
    return gradients
