"""``recfx.TrainPipeline`` on an NPU: the bits of steps one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from recfx.ir import format_graph
from tests.ascend.npu_runtime.training import DEVICE, assert_close, evaluate, make_batch, state_of, step
from tests.checkpoint.training import Training

HASHED = recfx.HashConfig(dense_rows=0)
TABLES = {
    "adopted": recfx.HashConfig(),
    "hashed": HASHED,
    "evict_admit": recfx.HashConfig(dense_rows=0, on_full="evict", admit_after=2),
}


@dataclass
class IdsOnHost:
    """A batch that leaves its ids on the host, where they are hashed."""

    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> IdsOnHost:
        return self


class WithLoss(nn.Module):
    """What a pipeline trains: a module that returns its loss first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: KeyedJaggedTensor | IdsOnHost) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.model(batch.features if isinstance(batch, IdsOnHost) else batch)
        return (output - 1).square().mean(), output.detach()


def built(tables: str) -> tuple[Training, list[KeyedJaggedTensor]]:
    training = Training.build("adagrad", TABLES[tables], rows=60)
    training.model.to(DEVICE)
    return training, [make_batch(number, 60, tables != "adopted") for number in range(6)]


@pytest.mark.parametrize("ids_on_host", [False, True], ids=["ids_on_npu", "ids_on_host"])
@pytest.mark.parametrize("tables", TABLES)
def test_changes_no_bit(tables: str, ids_on_host: bool) -> None:
    expected, batches = built(tables)
    outputs = [step(expected, features.to(torch.device(DEVICE))) for features in batches]

    training, batches = built(tables)
    training.model.train()
    pipeline = recfx.TrainPipeline(WithLoss(training.model), training.optimizer, torch.device(DEVICE))
    source, piped = iter([IdsOnHost(batch) if ids_on_host else batch for batch in batches]), []
    for _ in batches:
        result: Any = pipeline.progress(source)
        assert result.device == torch.device(DEVICE)
        piped.append(result.cpu())
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    assert_close({"outputs": piped, **state_of(training)}, {"outputs": outputs, **state_of(expected)}, rtol=0, atol=0)


@pytest.mark.usefixtures("simulated_kernels")
@pytest.mark.parametrize("tables", ["hashed", "evict_admit"])
def test_an_evaluation_between_two_steps(tables: str) -> None:
    """The next batch has been hashed for training, on the host, when eval mode finds its rows on the device."""
    unseen = make_batch(99, 80, True).to(torch.device(DEVICE))
    expected, batches = built(tables)
    outputs = []
    for number, features in enumerate(batches):
        outputs.append(step(expected, features.to(torch.device(DEVICE))))
        if number in (2, 3):
            outputs.append(evaluate(expected, unseen))
    training, batches = built(tables)
    pipeline = recfx.TrainPipeline(WithLoss(training.model), training.optimizer, torch.device(DEVICE))
    source, piped = iter(batches), []
    for number in range(len(batches)):
        training.model.train()
        result: Any = pipeline.progress(source)
        piped.append(result.cpu())
        if number in (2, 3):
            piped.append(evaluate(training, unseen))
            assert any(
                "find_rows(" in format_graph(module.graph_module)
                for module in training.model.modules()
                if isinstance(module, recfx.HashEmbeddingBagCollection)
            )
    assert_close({"outputs": piped, **state_of(training)}, {"outputs": outputs, **state_of(expected)}, rtol=0, atol=0)
