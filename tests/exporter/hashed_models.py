"""Trained hashed models for the tests of exported files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torchrec.fx
from torch import fx, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

import recfx

FEATURES = ["c", "a", "b", "d"]
HASHING = {
    "shared_by_two": recfx.HashConfig(dense_rows=0),
    "some_dense": recfx.HashConfig(dense_rows=3, rows=40, unseen="share"),
    "mean": recfx.HashConfig(dense_rows=0, rows=64, on_full="evict"),
    "adopted": recfx.HashConfig(),
}


class HashedModel(nn.Module):
    """Sums and means, raw ids, dense ids and an adopted table, of widths that no vector unit likes."""

    def __init__(self, is_weighted: bool = False) -> None:
        super().__init__()
        mean = PoolingType.SUM if is_weighted else PoolingType.MEAN
        tables = [
            EmbeddingBagConfig(
                name="shared_by_two",
                embedding_dim=8,
                num_embeddings=40,
                feature_names=["a", "b"],
                pooling=PoolingType.SUM,
            ),
            EmbeddingBagConfig(
                name="some_dense", embedding_dim=5, num_embeddings=30, feature_names=["c"], pooling=mean
            ),
            EmbeddingBagConfig(name="mean", embedding_dim=7, num_embeddings=64, feature_names=["a"], pooling=mean),
            EmbeddingBagConfig(
                name="adopted", embedding_dim=1, num_embeddings=20, feature_names=["d"], pooling=PoolingType.SUM
            ),
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)
        self.linear = nn.Linear(29, 2)

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.linear(self.ebc(features).values()) + dense


def call(batch_size: int, seed: int = 0, low: int = -20, high: int = 20, is_weighted: bool = False) -> recfx.Sample:
    """A call with ids from ``low`` to ``high``; those of the adopted table are its rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * batch_size,), generator=generator)
    ids = torch.randint(low, high, (int(lengths.sum()),), generator=generator)
    of_adopted = int(lengths[3 * batch_size :].sum())
    ids[ids.numel() - of_adopted :] %= 20
    weights = torch.rand(ids.numel(), generator=generator) if is_weighted else None
    features = KeyedJaggedTensor(FEATURES, ids, weights, lengths=lengths)
    return recfx.Sample(torch.rand(batch_size, 1, generator=generator), features)


def trained(is_weighted: bool = False) -> nn.Module:
    """A converted model after three steps with a fused optimizer; its indexes hold ids, id -1 among them."""
    torch.manual_seed(0)
    converted = recfx.convert(HashedModel(is_weighted), hashing=HASHING)
    _apply_optimizer_in_backward(torch.optim.SGD, converted.ebc.parameters(), {"lr": 0.5})  # type: ignore[arg-type]
    for step in range(3):
        sample = call(6, seed=step, is_weighted=is_weighted)
        converted(*sample.args).sum().backward()
    return converted.eval()


def by_name(sample: recfx.Sample) -> dict[str, torch.Tensor]:
    """The inputs of ``serve`` for a call."""
    dense, features = sample.args
    assert isinstance(features, KeyedJaggedTensor)
    tensors = {"dense": dense}
    lengths = features.lengths().view(len(features.keys()), -1)  # `to_dict` fails for a batch size of 0
    counts = lengths.sum(1).tolist()
    weights = features.weights_or_none()
    for number, (key, ids) in enumerate(zip(features.keys(), features.values().split(counts), strict=True)):
        tensors |= {f"features.{key}.values": ids, f"features.{key}.lengths": lengths[number]}
        if weights is not None:
            tensors[f"features.{key}.weights"] = weights.split(counts)[number]
    return tensors


TRACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the model": lambda model: model,
    "torch.fx": fx.symbolic_trace,
    "torchrec.fx": torchrec.fx.symbolic_trace,
    "recfx.trace": lambda model: recfx.trace(model, call(6, low=0)),
    "whole_graph": lambda model: recfx.convert(model, call(6, low=0), whole_graph=True),
}
"""A converted ``HashedModel``, and its graphs by the tracers that users have."""


def assert_same_file(path: Path, expected_path: Path) -> None:
    """Two TorchScript files hold the same collections and buffers."""
    loaded, expected = recfx.load(path), recfx.load(expected_path)
    assert loaded.manifest["collections"] == expected.manifest["collections"]
    for (name, actual), (_, value) in zip(loaded.script.named_buffers(), expected.script.named_buffers(), strict=True):
        assert torch.equal(actual, value), name
