"""Models that train on ids that keep arriving, and how the state of two of them is compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recfx
from recfx.collections.collection import unsharded_collections
from recfx.collections.kinds import table_in
from tests.builders.optimizers import attach

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.25}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "initial_accumulator_value": 0.25}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}
RAW = recfx.HashConfig(dense_rows=0, buckets=4)
CONFIGS: dict[str, recfx.HashConfig] = {
    "raw": RAW,
    "share": recfx.HashConfig(dense_rows=0, buckets=4, on_full="share", unseen="share", seed=7),
    "dense_and_raw": recfx.HashConfig(dense_rows=20, rows=400, buckets=2),
    "evict_lru": recfx.HashConfig(dense_rows=0, buckets=4, on_full="evict"),
    "evict_ttl": recfx.HashConfig(dense_rows=0, buckets=4, on_full="evict", evict="ttl", ttl_batches=2),
    "evict_lfu_admit": recfx.HashConfig(
        dense_rows=0, buckets=4, on_full="evict", evict="lfu", admit_after=2, unseen="share"
    ),
}
ROWS = 300
# Of an index, and the same for the same content; how full the queues of rows to evict are says nothing.
_DERIVED = ("slot_groups", "free_rows", "bucket_taken")


class TwoPart(nn.Module):
    """A dense part before and after the collections, so that some modules load before a torn index is met."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.first = collection(["a", "b"], rows)
        self.second = collection(["c"], rows, PoolingType.MEAN)
        self.after = nn.Linear(12, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        self.seen += features.stride()
        pooled = torch.cat([self.before(self.first(features).values()), self.second(features).values()], dim=1)
        return self.after(pooled).squeeze(1)


class WithSequences(TwoPart):
    """A pooled and a sequence collection: rows of the second one are summed here."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__(rows)
        self.second = sequence_collection("c", rows)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        self.seen += features.stride()
        summed = sum_of_samples(self.second(features)["c"])
        pooled = torch.cat([self.before(self.first(features).values()), summed], dim=1)
        return self.after(pooled).squeeze(1)


class OnePart(nn.Module):
    """As little as there can be: a table and a dense layer."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.first = collection(["a"], rows)
        self.after = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.after(self.first(features).values()).squeeze(1)


class OneSequence(OnePart):
    """``OnePart`` with a sequence table, whose rows are summed here."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__(rows)
        self.first = sequence_collection("a", rows)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.after(sum_of_samples(self.first(features)["a"])).squeeze(1)


def sequence_collection(table: str, rows: int) -> EmbeddingCollection:
    config = EmbeddingConfig(name=table, num_embeddings=rows, embedding_dim=4, feature_names=[table])
    return EmbeddingCollection([config])


def sum_of_samples(rows: JaggedTensor) -> torch.Tensor:
    """``[n, D]`` rows of ids, summed to ``[B, D]``."""
    return torch.segment_reduce(rows.values(), "sum", lengths=rows.lengths(), axis=0)


def collection(tables: list[str], rows: int, pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=[name], pooling=pooling)
            for name in tables
        ]
    )


@dataclass
class Training:
    """A converted model with a fused optimizer on its tables and an ordinary one on the rest."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    user_optimizers: dict[str, torch.optim.Optimizer]

    @classmethod
    def build(
        cls,
        kind: str = "adagrad",
        hashing: recfx.HashConfig | None = RAW,
        rows: int = ROWS,
        seed: int = 0,
        model_class: type[nn.Module] = TwoPart,
    ) -> Training:
        torch.manual_seed(seed)
        model = model_class(rows)
        optimizer_class, settings = KINDS[kind]
        tables = {name: parameter for name, parameter in model.named_parameters() if table_in(name)[1]}
        converted = recfx.convert(model, hashing=hashing)
        attach(tables.values(), optimizer_class, **settings)
        dense = [parameter for name, parameter in converted.named_parameters() if name not in tables]
        optimizer = torch.optim.Adam(dense, lr=0.01)
        attached = {name: parameter._in_backward_optimizers[0] for name, parameter in tables.items()}
        return cls(converted, optimizer, attached)

    def step(self, number: int) -> float:
        """One step on batch ``number``; half of its ids are new."""
        self.optimizer.zero_grad()
        features = batch(number)
        loss = (self.model(features) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def steps(self, begin: int, end: int) -> list[float]:
        return [self.step(number) for number in range(begin, end)]

    def save(self, directory: Path) -> None:
        recfx.save_checkpoint(self.model, directory, optimizer=self.optimizer)

    def load(self, directory: Path) -> None:
        recfx.load_checkpoint(self.model, directory, optimizer=self.optimizer)

    def everything(self) -> dict[str, Any]:
        """Copies of all state, also of what is derived and of what optimizers of the user's hold."""
        tensors: dict[str, Any] = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for path, collection in unsharded_collections(self.model).items():
            for table in collection.hash_indexes:
                index = collection.index(table)
                tensors.update({f"{path}.{table}.{name}": index._buffers[name] for name in _DERIVED})
                tensors[f"{path}.{table}.side_row"] = index.side_row[:1]  # without the seed
            for table, fused in collection.fused_optimizers().items():
                tensors.update({f"fused.{path}.{table}.{name}": value for name, value in fused.state.items()})
                tensors[f"fused.{path}.{table}"] = {k: v for k, v in fused.group.items() if k != "params"}
        for name, attached in self.user_optimizers.items():
            state = attached.state_dict()["state"].get(0, {})
            tensors.update({f"user.{name}.{key}": value for key, value in state.items()})
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors.update({f"optimizer.{number}.{key}": value for key, value in state.items()})
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}


def batch(number: int) -> KeyedJaggedTensor:
    """Eight samples of two ids a feature: some from a small pool, some that no batch before had."""
    generator = torch.Generator().manual_seed(number)
    old = torch.randint(0, 10, (24,), generator=generator)
    new = 10**12 + 16 * number + torch.randint(0, 16, (24,), generator=generator)
    values = torch.stack([old, new], dim=1).view(-1)
    return KeyedJaggedTensor(["a", "b", "c"], values, lengths=torch.full((24,), 2))


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    """To the bit."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == right[name].dtype, name
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name
