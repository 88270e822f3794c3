"""Trained hashed models for the tests of exported files."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)

import recfx

FEATURES = ["c", "a", "b", "d"]
FORMATS: dict[str, dict[str, Any]] = {
    "torchscript": {},
    "with recfx's operators": {"portable": False},
    "for a device": {"device": "npu"},
    "pt2": {"format": "pt2"},
}
"""The options of ``export`` that make each kind of file."""

IDS = ((-20, 20), (-(2**63), 2**63 - 1), (10_000, 20_000))  # seen in training, extreme, never seen

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


class Scaled(nn.Module):
    """Compiled by TorchScript, as it branches, with tensors in attributes, one of which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.factor = torch.ones(29), torch.ones(29), nn.Parameter(torch.ones(29))
        self.factors, self.unread = [self.factor], [torch.ones(1)]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if bool(rows.sum() > 0):
            return rows * self.low * self.factors[0]
        return rows * self.high * self.factors[0]


class RecurrentModel(HashedModel):
    """With a GRU, whose compiled form has a list of its weights, and another module whose attributes are read."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.scaled = nn.GRU(29, 29), Scaled()

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        states, _ = self.recurrent(self.scaled(self.ebc(features).values()).unsqueeze(0))
        return self.linear(states.squeeze(0)) + dense


class SequenceModel(nn.Module):
    """A row for each id of raw ids, dense ids and an adopted table, of two widths, beside pooled rows."""

    def __init__(self) -> None:
        super().__init__()

        def collection(dim: int, *tables: tuple[str, int, list[str]], need_indices: bool = False) -> nn.Module:
            configs = [
                EmbeddingConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=features)
                for name, rows, features in tables
            ]
            return EmbeddingCollection(tables=configs, need_indices=need_indices)

        self.wide = collection(8, ("shared_by_two", 40, ["a", "b"]), need_indices=True)
        self.odd = collection(5, ("adopted", 20, ["d"]), ("some_dense", 30, ["c"]), ("again", 20, ["d"]))
        self.ebc = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="mean", embedding_dim=7, num_embeddings=64, feature_names=["a"])]
        )
        self.linear = nn.Linear(24, 2)

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        wide, odd = self.wide(features), self.odd(features)
        a, b, c = wide["a"], wide["b"], odd["c"]
        of_a = a.values() * (a.weights() % 7).unsqueeze(1)  # the ids themselves
        by_sample = [
            torch.ops.fbgemm.jagged_2d_to_dense(of_a, a.offsets(), 3).sum(dim=1),
            b.to_padded_dense(3).sum(dim=1)[:, : self.wide.embedding_dim() // 2],
            c.to_padded_dense(3).amax(dim=1),
            (odd["d@adopted"].to_padded_dense(2) - odd["d@again"].to_padded_dense(2)).sum(dim=1)[:, 1:],
            self.ebc(features).values()[:, 4:],
        ]
        return self.linear(torch.cat(by_sample, dim=1)) + dense


class SequenceOutput(nn.Module):
    """What the collections of a ``SequenceModel`` return, as it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wide, self.odd = model.wide, model.odd

    def forward(self, features: KeyedJaggedTensor) -> tuple[dict[str, JaggedTensor], dict[str, JaggedTensor]]:
        return self.wide(features), self.odd(features)


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


def trained(is_weighted: bool = False, model: type[nn.Module] | None = None) -> nn.Module:
    """A converted model after three steps with a fused optimizer; its indexes hold ids, id -1 among them."""
    torch.manual_seed(0)
    converted = recfx.convert(HashedModel(is_weighted) if model is None else model(), hashing=HASHING)
    tables = [parameter for name, parameter in converted.named_parameters() if "embedding" in name]
    _apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.5})
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


def assert_same_file(path: Path, expected_path: Path) -> None:
    """Two TorchScript files hold the same collections and buffers."""
    loaded, expected = recfx.load(path), recfx.load(expected_path)
    assert loaded.manifest["collections"] == expected.manifest["collections"]
    for (name, actual), (_, value) in zip(loaded.script.named_buffers(), expected.script.named_buffers(), strict=True):
        assert torch.equal(actual, value), name
