"""The training of ``cases``, through a pipeline or step by step; what it leaves is compared to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.streamable import Pipelineable

import recfx
from recfx.collections.sharding.collection import ShardedCollection
from tests.sharding.cases import (
    OPTIMIZERS,
    Case,
    batches,
    build,
    dense_parameters,
    model_and_plan,
    model_parallel,
    plain_model,
    shard,
    shards_of,
    values_of,
)

CPU = torch.device("cpu")


class Loop:
    """One step after the other, with the pipelines' interface."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.model, self.optimizer = model, optimizer

    def progress(self, iterator: Iterator[Any]) -> Any:
        batch = next(iterator)
        if self.model.training:
            self.optimizer.zero_grad()
        loss, output = self.model(batch)
        if self.model.training:
            loss.backward()
            self.optimizer.step()
        return output


PIPELINES: dict[str, Callable[..., Any]] = {
    "loop": Loop,
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "recfx": recfx.TrainPipeline,
}


class Two(nn.Module):
    """Two collections that read the same features, and one input each that is not theirs.

    Each has a value a sample or one an id, so that the layer over them takes sums of a batch.
    """

    def __init__(self, first: nn.Module, second: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.second, self.over = first, second, nn.Linear(width + 2, 3)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss_and_output(batch.features, batch)

    def loss_and_output(self, first: KeyedJaggedTensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and all values; ``first``: what the first collection is called with."""
        both = [values_of(self.first(first)), values_of(self.second(batch.features))]
        summed = torch.cat([values.tanh().sum(0) for values in (*both, batch.dense)])
        return (self.over(summed).tanh() ** 2).mean(), torch.cat([values.detach().flatten() for values in both])


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor
    dense: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device, non_blocking), self.dense.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return Batch(self.features.pin_memory(), self.dense.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        self.dense.record_stream(stream)


def sharded_model(case: Case, world_size: int, form: str) -> nn.Module:
    """The case's model.

    Args:
        form: ``"alone"``: the collection is sharded by itself; ``"wrapped"``: by ``DistributedModelParallel``;
            ``"two"``: of two collections, the second of them of ``case.beside`` if there is such a case.
    """
    if form == "wrapped":
        return model_parallel(*model_and_plan(case, world_size))
    model: Any = plain_model(case)
    model.sparse = shard(case, model.sparse, world_size)
    if form == "two":
        second, width = build(case.beside or case)
        torch.manual_seed(1)
        model = Two(model.sparse, shard(case.beside or case, second, world_size), width + model.over.in_features)
    model.over = nn.parallel.DistributedDataParallel(model.over)
    return model


def batches_of_rank(case: Case, rank: int, world_size: int, steps: int, form: str) -> list[Any]:
    """As the form's model takes them."""
    mine: list[Any] = [step[rank] for step in batches(case, world_size, steps)]
    return [Batch(features, torch.ones(features.stride(), 2)) for features in mine] if form == "two" else mine


def dense_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    kind, settings = OPTIMIZERS[case.optimizer]
    return kind(dense_parameters(case, model), **settings)


def collections(model: nn.Module) -> list[ShardedCollection]:
    return [module for module in model.modules() if isinstance(module, ShardedCollection)]


def what_is_left(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and every index on this rank."""
    left = {f"parameter {number}": p.detach().clone() for number, p in enumerate(model.parameters())}
    for number, collection in enumerate(collections(model)):
        for name, index in collection.hash_indexes.items():
            for part, value in index.state_dict().items():
                left[f"{number} {name} {part}"] = torch.as_tensor(value).clone()
    return left


def train(
    rank: int, world_size: int, case: Case, pipeline: str, form: str = "alone", modes: str = "ttttt"
) -> dict[str, Any]:
    """Train on this rank until the batches end, a batch a letter of ``modes``: training or eval.

    ``shards``, ``pooled`` and ``over`` are as those of ``cases.train_sharded``.
    """
    model = sharded_model(case, world_size, form)
    driver = PIPELINES[pipeline](model, dense_optimizer(case, model), CPU)
    source, pooled = iter(batches_of_rank(case, rank, world_size, len(modes), form)), []
    for mode in modes:
        model.train(mode == "t")
        pooled.append(driver.progress(source))
    with pytest.raises(StopIteration):
        driver.progress(source)
    sparse = collections(model)
    over = next(p for name, p in model.named_parameters() if "over." in name and name.endswith("weight"))
    return {
        "pooled": pooled,
        "shards": shards_of(sparse[0]),
        "over": over.detach(),
        "left": what_is_left(model),
        "forwards": [type(collection.forward).__name__ for collection in sparse],
        "reported": [_is_reported_pipelined(collection) for collection in sparse],
    }


def assert_same(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal bits on every rank."""
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine["pooled"], theirs["pooled"], rtol=0, atol=0)
        torch.testing.assert_close(mine["left"], theirs["left"], rtol=0, atol=0)


def _is_reported_pipelined(collection: nn.Module) -> bool:
    (report,) = recfx.explain(collection).collections
    return any(reason.code == "pipelined" for reason in report.reasons)
