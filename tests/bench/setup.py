"""The size of a run, and fresh ids for every iteration. Imports torch alone: benchmarks on a device need no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

POWER_LAW_EXPONENT = 1.05
SMALL_BATCH = 64


@dataclass(frozen=True)
class Setup:
    """The size of a run; printed with every number.

    Args:
        tables: number of tables, one feature each.
        rows: rows per table.
        dim: columns per table.
        batch: samples per batch.
        bag_length: ids per sample and feature.
        pooling: ``"SUM"`` or ``"MEAN"``, for every table.
        is_weighted: whether ids have weights.
        threads: torch's number of threads.
        iterations: timed iterations.
        warm_up: iterations before those.
        model_sizes: numbers of tables of the models that ``convert_time`` converts.
        one_table_rows: rows of the single large table of ``hashed``.
        huge_table_rows: rows of a table of which the caches hold next to nothing.
        index_sizes: numbers of ids in the indexes of ``hash_index``, ascending.
        device: of the benchmarks ``triton/...``.
    """

    tables: int = 26
    rows: int = 100_000
    dim: int = 64
    batch: int = 2048
    bag_length: int = 10
    pooling: str = "SUM"
    is_weighted: bool = False
    threads: int = 2
    iterations: int = 40
    warm_up: int = 4
    model_sizes: tuple[int, ...] = (125, 250, 500, 1000)
    one_table_rows: int = 10_000_000
    huge_table_rows: int = 20_000_000
    index_sizes: tuple[int, ...] = (500_000, 10_000_000, 20_000_000)
    device: str = "cuda"

    def facts(self, ids: str) -> dict[str, Any]:
        """As printed and written to JSON."""
        return {
            "tables": self.tables,
            "rows": self.rows,
            "dim": self.dim,
            "batch": self.batch,
            "bag_length": self.bag_length,
            "ids": ids,
            "pooling": self.pooling + (", weighted" if self.is_weighted else ""),
            "threads": self.threads,
        }

    def case(self, ids: str) -> str:
        """Name of a case of this setup."""
        parts = [ids, "" if self.pooling == "SUM" else self.pooling.lower(), "weighted" if self.is_weighted else ""]
        parts.append("small batch" if self.batch <= SMALL_BATCH else "")
        return "/".join(part.replace(" ", "_") for part in parts if part)

    def of_one_table(self, rows: int) -> Setup:
        """A setup of as many ids, all in one table of that many rows."""
        return replace(self, tables=1, rows=rows, bag_length=self.tables * self.bag_length)

    def variants(self) -> tuple[Setup, ...]:
        """This setup, and others that users have: means, weighted sums, small batches."""
        small = min(self.batch, SMALL_BATCH)
        return (
            self,
            replace(self, pooling="MEAN"),
            replace(self, is_weighted=True),
            replace(self, batch=small, iterations=4 * self.iterations),
        )


QUICK = Setup(
    tables=4, rows=500, dim=16, batch=32, bag_length=3, iterations=3, warm_up=1, model_sizes=(2, 4, 8, 16),
    one_table_rows=2000, huge_table_rows=3000, index_sizes=(2000, 4000),
)  # fmt: skip
DISTRIBUTIONS = ("uniform", "power law")


class Ids:
    """Fresh ids for every iteration, made before anything is timed.

    Args:
        setup: the sizes.
        distribution: ``"uniform"``, or ``"power law"`` (the id of rank ``k`` has probability ``~ k ** -1.05``; ranks
            are scattered over the rows).
        universe: ids are below this; by default the rows.
        raw: maps dense ids ``[n]`` before they go into a batch; None leaves them as they are.
    """

    def __init__(
        self,
        setup: Setup,
        distribution: str,
        universe: int | None = None,
        raw: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.setup = setup
        universe = universe or setup.rows
        per_feature = setup.batch * setup.bag_length
        generator = torch.Generator().manual_seed(1)
        iterations = setup.iterations + setup.warm_up + 1
        self.dense: list[torch.Tensor] = []
        cumulative = torch.arange(1, universe + 1, dtype=torch.float64).pow(-POWER_LAW_EXPONENT).cumsum(0)
        places = torch.randperm(universe, generator=generator)
        for _ in range(iterations):
            size = (setup.tables * per_feature,)
            if distribution == "uniform":
                self.dense.append(torch.randint(0, universe, size, generator=generator))
            else:
                drawn = torch.rand(size, dtype=torch.float64, generator=generator) * cumulative[-1]
                self.dense.append(places[torch.searchsorted(cumulative, drawn).clamp_(max=universe - 1)])
        self.values = self.dense if raw is None else [raw(dense) for dense in self.dense]
        weighted = range(iterations if setup.is_weighted else 0)
        self.weights = [torch.rand(setup.tables * per_feature, generator=generator) for _ in weighted]
        self.offsets = torch.arange(0, setup.tables * per_feature + 1, setup.bag_length)

    def batches(self) -> list[KeyedJaggedTensor]:
        """One KJT per iteration (the last one is for checks), with only lengths, as a data loader makes it.

        A KJT caches what was computed from it, so every contestant gets its own.
        """
        from torchrec import KeyedJaggedTensor

        bags = self.setup.tables * self.setup.batch
        return [
            KeyedJaggedTensor(
                feature_names(self.setup),
                values,
                self.weights[iteration] if self.weights else None,
                lengths=torch.full((bags,), self.setup.bag_length, dtype=torch.int64),
                stride=self.setup.batch,
            )
            for iteration, values in enumerate(self.values)
        ]


def embedding_bags(
    rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], bags: torch.Tensor,
    scales: Sequence[torch.Tensor] = (), **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """``torch.nn.functional.embedding_bag`` of each table, whose bags begin at the same places."""
    return [
        functional.embedding_bag(
            own, weight, bags, mode="sum", include_last_offset=True, per_sample_weights=scale, **options
        )
        for own, weight, scale in zip(rows, weights, scales or [None] * len(rows), strict=True)
    ]


def feature_names(setup: Setup) -> list[str]:
    return [f"feature_{table}" for table in range(setup.tables)]
