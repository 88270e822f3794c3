"""Two hashed tables trained beside their oracle: a weight and a state for each id, forgotten with the id."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from recfx.kernels.step.row_initialization import initial_rows, initialization_key
from tests.builders import optimizers
from tests.builders.collections import table
from tests.hashing.dictionary import Dictionary

Bags = list[list[int]]


class Optimizer:
    """One rule of ``torch.optim`` for one row at a time."""

    def __init__(self, kind: str, lr: float, eps: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        self.kind, self.lr, self.eps, self.betas = kind, lr, eps, betas
        self.steps = 0

    def update(self, row: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        """The row after a step; ``state`` is empty for a row that is new."""
        if self.kind == "sgd":
            return row - self.lr * gradient
        if self.kind in ("adagrad", "rowwise_adagrad"):
            square = gradient**2 if self.kind == "adagrad" else (gradient**2).mean()
            state["sum"] = state.get("sum", torch.zeros_like(square)) + square
            return row - self.lr * gradient / (state["sum"].sqrt() + self.eps)
        for name, power, beta in (("exp_avg", 1, self.betas[0]), ("exp_avg_sq", 2, self.betas[1])):
            state[name] = beta * state.get(name, torch.zeros_like(row)) + (1 - beta) * gradient**power
        mean = state["exp_avg"] / (1 - self.betas[0] ** self.steps)
        square = state["exp_avg_sq"] / (1 - self.betas[1] ** self.steps)
        return row - self.lr * mean / (square.sqrt() + self.eps)


class Table:
    """What one table of a converted collection must do; float64 inside.

    Args:
        name, config, weight: of the table; ``weight`` as it is before the first batch (shared rows may be nobody's).
        optimizer: None for a table that is not trained.
        mean: MEAN pooling, else SUM.
    """

    def __init__(
        self, name: str, config: HashConfig, weight: torch.Tensor, optimizer: Optimizer | None, mean: bool = False
    ) -> None:
        self.name, self.config, self.optimizer, self.mean = name, config, optimizer, mean
        rows, dim = weight.shape
        self.ids = Dictionary(rows, config)
        self.rows = dict(enumerate(weight.detach().double()))
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        self._key, self._dim = initialization_key(name, config.seed), dim
        self._bound = 1 / math.sqrt(rows)

    def insert(self, bags: Bags, batches_in_flight: int = 0) -> list[int] | None:
        """The answers to one batch, see ``Dictionary``; rows that are new start anew."""
        inserted = self.ids.insert([id_ for bag in bags for id_ in bag], batches_in_flight)
        if inserted is None:
            return None
        owners = self.ids.owners()
        for row in inserted.new_rows:
            self.rows[row] = self._first(owners[row])
            self.states.pop(row, None)
        return inserted.answers

    def _first(self, id_: int) -> torch.Tensor:
        return initial_rows(torch.tensor([id_]), self._dim, self._key, -self._bound, self._bound)[0].double()

    def pool(self, bags: Bags, answers: Sequence[int], scales: Sequence[float]) -> torch.Tensor:
        """``[bags, dim]``"""
        pooled, position = torch.zeros(len(bags), self._dim, dtype=torch.float64), 0
        for number, bag in enumerate(bags):
            for _ in bag:
                answer = answers[position]
                if answer != -1:
                    pooled[number] += scales[position] * self.rows[-answer - 2 if answer < -1 else answer]
                position += 1
            if self.mean:
                pooled[number] /= max(len(bag), 1)
        return pooled

    def train(self, bags: Bags, answers: Sequence[int], scales: Sequence[float], gradient: torch.Tensor) -> None:
        """One step with this gradient of ``pool(...)``; only rows that an answer at or above zero names move."""
        assert self.optimizer is not None
        self.optimizer.steps += 1
        sums: dict[int, torch.Tensor] = {}
        position = 0
        for number, bag in enumerate(bags):
            for _ in bag:
                if answers[position] >= 0:
                    share = scales[position] * gradient[number].double() / (len(bag) if self.mean else 1)
                    sums[answers[position]] = sums.get(answers[position], 0) + share
                position += 1
        for row, total in sums.items():
            state = self.states.setdefault(row, {})
            self.rows[row] = self.optimizer.update(self.rows[row], total, state)

    def assert_same(self, collection: HashEmbeddingBagCollection) -> None:
        """The collection holds these ids, with these weights."""
        ids, rows = collection.index(self.name).items()
        assert dict(zip(rows.tolist(), ids.tolist(), strict=True)) == self.ids.owners()
        assert collection.index(self.name).counts.tolist() == list(self.ids.counters.values())
        if rows.numel() > 0:
            expected = torch.stack([self.rows[row] for row in rows.tolist()]).float()
            torch.testing.assert_close(collection.weight(self.name).detach()[rows], expected, rtol=1e-5, atol=1e-6)


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
