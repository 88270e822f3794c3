"""A hashed table in plain Python: a weight and an optimizer state for each id, forgotten with the id."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.hashing import HashConfig
from recfx.kernels.step.row_initialization import initial_rows, initialization_key
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
        self,
        name: str,
        config: HashConfig,
        weight: torch.Tensor,
        optimizer: Optimizer | None,
        mean: bool = False,
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
