"""``convert_time``: how long a conversion takes, and how it grows with the number of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx
from tests.bench.harness import Contestant, Result, compare, take_turns
from tests.bench.setup import Setup

CONVERT, CONSTRUCT = "recfx.convert", "EmbeddingBagCollection(...)"
ROWS, DIM, BATCH, BAG_LENGTH = 100, 16, 32, 2
REPEATS = 5


def run(setup: Setup) -> Iterator[Result]:
    """Models of 125 to 1,000 tables; ``growth`` is the time relative to the model of half the size (linear: 2)."""
    for checks, verify in (("no checks", False), ("verified", True)):
        before: float | None = None
        for tables in setup.model_sizes:
            model, sample = _model(tables), _sample(tables)
            convert = _conversion(model, sample, verify)
            _check(model, convert(0), sample)
            contestants = [
                Contestant(CONVERT, convert),
                Contestant(CONSTRUCT, lambda _, tables=tables: _model(tables)),
            ]
            times = take_turns(contestants, REPEATS if not verify else 2, 0)
            facts = {
                "tables": tables, "rows": ROWS, "dim": DIM, "batch": BATCH, "bag_length": BAG_LENGTH,
                "ids": "uniform", "threads": setup.threads, "checks": checks,
            }  # fmt: skip
            case = f"convert_time/{checks.replace(' ', '_')}/{tables}_tables"
            result = compare(case, times, CONVERT, CONSTRUCT, facts)
            result.setup["seconds"] = round(result.ours_ms / 1e3, 3)
            if before is not None:
                result.setup["growth"] = round(result.ours_ms / before, 3)
            before = result.ours_ms
            yield result


def _conversion(model: EmbeddingBagCollection, sample: Any, verify: bool) -> Callable[[int], torch.nn.Module]:
    return lambda _: recfx.convert(model, sample=sample, verify=verify)


def _model(tables: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"table_{table}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"feature_{table}"]
            )
            for table in range(tables)
        ]
    )


def _sample(tables: int) -> tuple[KeyedJaggedTensor]:
    bags = tables * BATCH
    return (
        KeyedJaggedTensor(
            [f"feature_{table}" for table in range(tables)],
            torch.randint(0, ROWS, (bags * BAG_LENGTH,)),
            lengths=torch.full((bags,), BAG_LENGTH),
        ),
    )


def _check(model: EmbeddingBagCollection, converted: torch.nn.Module, sample: tuple[KeyedJaggedTensor]) -> None:
    torch.testing.assert_close(converted(*sample).values(), model(*sample).values(), rtol=1e-5, atol=1e-6)
