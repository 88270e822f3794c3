"""Standard collections, optimizers, and the peers on the same tables."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recfx.collections.collection import UnshardedCollection
from recfx.kernels.index.mix64 import mix64
from tests.bench import fbgemm_module
from tests.bench.setup import Setup

LEARNING_RATE = 0.0625
EPS = 1e-8


def standard_collection(setup: Setup) -> Any:
    """The collection that users have, with uniform weights as by TorchRec's default; of sequences without pooling."""
    kind: Any = (
        EmbeddingConfig if setup.pooling == "NONE" else partial(EmbeddingBagConfig, pooling=PoolingType[setup.pooling])
    )
    tables = [
        kind(
            name=f"table_{table}",
            num_embeddings=setup.rows,
            embedding_dim=setup.dim,
            feature_names=[f"feature_{table}"],
        )
        for table in range(setup.tables)
    ]
    if setup.pooling == "NONE":
        return EmbeddingCollection(tables)
    return EmbeddingBagCollection(tables, is_weighted=setup.is_weighted)


@dataclass(frozen=True)
class Optimizer:
    """One fused optimizer in TorchRec's terms; ``fbgemm_module.RULES`` has FBGEMM's, by the name."""

    name: str
    standard: type[torch.optim.Optimizer]
    arguments: dict[str, float]


OPTIMIZERS = (
    Optimizer("sgd", torch.optim.SGD, {"lr": LEARNING_RATE}),
    Optimizer("adagrad", torch.optim.Adagrad, {"lr": LEARNING_RATE, "eps": EPS}),
    Optimizer("rowwise_adagrad", RowWiseAdagrad, {"lr": LEARNING_RATE, "eps": EPS}),
)

ADAM = Optimizer("adam", torch.optim.Adam, {"lr": LEARNING_RATE, "eps": EPS})
"""Which FBGEMM has not on the CPU."""


def with_optimizer(collection: EmbeddingBagCollection, optimizer: Optimizer) -> EmbeddingBagCollection:
    """A copy of the collection whose tables are updated in backward."""
    duplicate = copy.deepcopy(collection)
    attach(duplicate, optimizer)
    return duplicate


def attach(collection: nn.Module, optimizer: Optimizer) -> None:
    apply_optimizer_in_backward(optimizer.standard, collection.parameters(), dict(optimizer.arguments))


def table_batched(setup: Setup, collection: nn.Module, optimizer: Optimizer) -> SplitTableBatchedEmbeddingBagsCodegen:
    """FBGEMM's own module with the same weights."""
    return fbgemm_module.table_batched(table_weights(collection), optimizer.name, LEARNING_RATE, EPS, setup.pooling)


def table_weights(collection: nn.Module) -> list[torch.Tensor]:
    """One ``[rows, dim]`` tensor per table, in order."""
    named = collection.named_parameters()
    return [weight for name, weight in named if name.startswith(("embedding_bags.", "embeddings."))]


def output_gradients(setup: Setup, count: int) -> list[torch.Tensor]:
    """``[B, sum D]`` gradients, or ``[n, D]`` without pooling: multiples of 1/16, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(2)
    shape = (setup.batch, setup.tables * setup.dim)
    if setup.pooling == "NONE":
        shape = (setup.tables * setup.batch * setup.bag_length, setup.dim)
    return [torch.randint(-8, 9, shape, generator=generator) / 16 for _ in range(count)]


def check_close(what: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
    """Check that results agree within the usual tolerances, because timing wrong results would be pointless."""
    torch.testing.assert_close(
        actual.detach(), expected.detach(), rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}"
    )


def fill_with_ids(indexed: UnshardedCollection, adopted: nn.Module, universe: int) -> None:
    """Give every id a row, in a random order, with the weights that its dense id has in the adopted collection."""
    generator = torch.Generator().manual_seed(3)
    for index, ours, theirs in zip(
        indexed.hash_indexes.values(), table_weights(indexed), table_weights(adopted), strict=True
    ):
        dense = torch.randperm(universe, generator=generator)
        rows = index.find_or_insert(mix64(dense))
        with torch.no_grad():
            ours[rows] = theirs[dense]
