"""Two hashed tables trained beside their oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from tests.builders import optimizers
from tests.builders.collections import table
from tests.support.per_id import Bags, Optimizer, Table

ROWS = {"t1": 26, "t2": 16}
FEATURES = {"t1": ["f1", "f2"], "t2": ["f3"]}
DIMS = {"t1": 4, "t2": 8}
BATCH = 3


@dataclass
class Batch:
    """Bags of every table, feature by feature, and a scale for every id."""

    bags: dict[str, Bags]
    scales: dict[str, list[float]]
    is_weighted: bool

    @property
    def features(self) -> KeyedJaggedTensor:
        bags = [bag for bags_of_table in self.bags.values() for bag in bags_of_table]
        ids = torch.tensor([id_ for bag in bags for id_ in bag], dtype=torch.int64)
        scales = torch.tensor([scale for scales_of_table in self.scales.values() for scale in scales_of_table])
        return KeyedJaggedTensor(
            [name for names in FEATURES.values() for name in names], ids, scales if self.is_weighted else None,
            lengths=torch.tensor([len(bag) for bag in bags]), stride=BATCH,
        )  # fmt: skip


@dataclass
class Forward:
    """A forward whose backward is to come."""

    batch: Batch
    answers: dict[str, list[int]]
    output: torch.Tensor


@dataclass
class Pair:
    """A converted collection and what it must do."""

    model: HashEmbeddingBagCollection
    oracle: dict[str, Table]
    is_weighted: bool
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    def random(self, *size: int, high: int) -> list[int]:
        return torch.randint(0, high, size, generator=self.generator).tolist()

    def batch(self, universe: int = 40, longest: int = 3) -> Batch:
        bags: dict[str, Bags] = {}
        scales: dict[str, list[float]] = {}
        for name, features in FEATURES.items():
            lengths = self.random(len(features) * BATCH, high=longest + 1)
            bags[name] = [[id_ * 2**40 - 5 for id_ in self.random(length, high=universe)] for length in lengths]
            count = sum(lengths)
            drawn = (1 + torch.rand(count, generator=self.generator)).tolist()
            scales[name] = drawn if self.is_weighted else [1.0] * count
        return Batch(bags, scales, self.is_weighted)

    def forward(self, batch: Batch, batches_in_flight: int = 0) -> Forward:
        """Both; their outputs agree."""
        answers = {}
        for name, oracle in self.oracle.items():
            answer = oracle.insert(batch.bags[name], batches_in_flight)
            assert answer is not None, "the case is too large for the table"
            answers[name] = answer
        output = self.model(batch.features).values()
        torch.testing.assert_close(output.detach(), self.pooled(batch, answers), rtol=1e-5, atol=1e-6)
        return Forward(batch, answers, output)

    def pooled(self, batch: Batch, answers: dict[str, list[int]]) -> torch.Tensor:
        columns: list[torch.Tensor] = []
        for name, oracle in self.oracle.items():
            pooled = oracle.pool(batch.bags[name], answers[name], batch.scales[name])
            columns += pooled.split(BATCH)  # one block a feature
        return torch.cat(columns, dim=1).float()

    def backward(self, forward: Forward) -> None:
        """Both; their weights agree."""
        gradient = torch.randn(forward.output.shape, generator=self.generator)
        forward.output.backward(gradient)
        column = 0
        for name, oracle in self.oracle.items():
            blocks = []
            for _ in FEATURES[name]:
                blocks.append(gradient[:, column : column + DIMS[name]])
                column += DIMS[name]
            oracle.train(forward.batch.bags[name], forward.answers[name], forward.batch.scales[name], torch.cat(blocks))
        self.assert_same()

    def step(self, batch: Batch | None = None) -> None:
        self.backward(self.forward(self.batch() if batch is None else batch))

    def evaluate(self, batch: Batch) -> None:
        """Eval mode agrees as well, and changes no state."""
        before = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.model.eval()
        with torch.no_grad():  # otherwise its rows would be kept for a backward
            output = self.model(batch.features).values()
        self.model.train()
        answers = {name: [t.ids.answer(i) for bag in batch.bags[name] for i in bag] for name, t in self.oracle.items()}
        torch.testing.assert_close(output.detach(), self.pooled(batch, answers), rtol=1e-5, atol=1e-6)
        for key, value in self.model.state_dict().items():
            assert torch.equal(value, before[key]), key

    def assert_same(self) -> None:
        for oracle in self.oracle.values():
            oracle.assert_same(self.model)

    def total(self, counter: str) -> int:
        return sum(oracle.ids.counters[counter] for oracle in self.oracle.values())


def pair(
    configs: dict[str, HashConfig],
    optimizer: str = "sgd",
    *,
    attach: str = "before",
    mean: bool = False,
    is_weighted: bool = False,
    **options: Any,
) -> Pair:
    """``t1`` (of two features) and ``t2``, trained by one kind of optimizer attached before or after the conversion."""
    pooling = PoolingType.MEAN if mean else PoolingType.SUM
    tables = [
        table(name, FEATURES[name], dim=DIMS[name], rows=ROWS[name], pooling=pooling, **options) for name in configs
    ]
    plain = EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)
    if attach == "before":
        optimizers.attach(plain, optimizer)
    model = convert(plain, hashing=configs)
    if attach == "after":
        optimizers.attach(model, optimizer)
    assert isinstance(model, HashEmbeddingBagCollection)
    oracle = {
        name: Table(name, config, model.weight(name), Optimizer(optimizer, 0.1), mean)
        for name, config in configs.items()
    }
    return Pair(model, oracle, is_weighted)
