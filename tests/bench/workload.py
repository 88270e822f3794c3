"""The workload: tables, fresh ids for every iteration, and the peers on the same tables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

LEARNING_RATE = 0.0625
EPS = 1e-8
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
        index_sizes: numbers of ids in the indexes of ``hash_index``, ascending.
        generations: how often ``hash_index`` fills a table anew.
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
    index_sizes: tuple[int, ...] = (500_000, 10_000_000, 20_000_000)
    generations: int = 1000

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
    one_table_rows=2000, index_sizes=(2000, 4000), generations=20,
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


def feature_names(setup: Setup) -> list[str]:
    """One config per table."""
    return [f"feature_{table}" for table in range(setup.tables)]


def standard_collection(setup: Setup, tables: int | None = None) -> EmbeddingBagCollection:
    """The collection that users have, with uniform weights as by TorchRec's default."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"table_{table}",
                num_embeddings=setup.rows,
                embedding_dim=setup.dim,
                feature_names=[f"feature_{table}"],
                pooling=PoolingType[setup.pooling],
            )
            for table in range(tables or setup.tables)
        ],
        is_weighted=setup.is_weighted,
    )


@dataclass(frozen=True)
class Optimizer:
    """One fused optimizer, in TorchRec's and in FBGEMM's terms."""

    name: str
    standard: type[torch.optim.Optimizer]
    arguments: dict[str, float]
    fbgemm: EmbOptimType


OPTIMIZERS = (
    Optimizer("sgd", torch.optim.SGD, {"lr": LEARNING_RATE}, EmbOptimType.EXACT_SGD),
    Optimizer("adagrad", torch.optim.Adagrad, {"lr": LEARNING_RATE, "eps": EPS}, EmbOptimType.EXACT_ADAGRAD),
    Optimizer("rowwise_adagrad", RowWiseAdagrad, {"lr": LEARNING_RATE, "eps": EPS}, EmbOptimType.EXACT_ROWWISE_ADAGRAD),
)


def with_optimizer(collection: EmbeddingBagCollection, optimizer: Optimizer) -> EmbeddingBagCollection:
    """A copy of the collection whose tables are updated in backward."""
    duplicate = copy.deepcopy(collection)
    attach(duplicate, optimizer)
    return duplicate


def attach(collection: EmbeddingBagCollection, optimizer: Optimizer) -> None:
    """Have the tables of the collection updated in backward."""
    apply_optimizer_in_backward(optimizer.standard, collection.parameters(), dict(optimizer.arguments))


def table_batched(
    setup: Setup, collection: EmbeddingBagCollection, optimizer: Optimizer
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """FBGEMM's own module with the same weights, as TorchRec's fused kernel builds it, including its bounds check."""
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(setup.rows, setup.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * setup.tables,
        optimizer=optimizer.fbgemm,
        pooling_mode=PoolingMode[setup.pooling],
        learning_rate=LEARNING_RATE,
        eps=EPS,
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        for ours, theirs in zip(table_weights(collection), module.split_embedding_weights(), strict=True):
            theirs.copy_(ours)
    return module


def table_weights(collection: nn.Module) -> list[torch.Tensor]:
    """One ``[rows, dim]`` tensor per table, in order."""
    return [weight for name, weight in collection.named_parameters() if name.startswith("embedding_bags.")]


def output_gradients(setup: Setup, count: int) -> list[torch.Tensor]:
    """``[B, sum D]`` gradients, multiples of 1/16: their sums are exact in any order, so contestants agree."""
    generator = torch.Generator().manual_seed(2)
    shape = (setup.batch, setup.tables * setup.dim)
    return [torch.randint(-8, 9, shape, generator=generator) / 16 for _ in range(count)]


def check_close(what: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
    """Check that results agree within the usual tolerances, because timing wrong results would be pointless."""
    torch.testing.assert_close(
        actual.detach(), expected.detach(), rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}"
    )
