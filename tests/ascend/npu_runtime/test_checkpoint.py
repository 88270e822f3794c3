"""Checkpoints of a model on an NPU: they resume there, on another NPU and on the CPU, and those of the CPU here."""

from pathlib import Path

import pytest
import torch

import recfx
from tests.ascend.npu_runtime.training import assert_close, make_batch, state_of, step
from tests.checkpoint.training import KINDS, Training

EVICTS = recfx.HashConfig(dense_rows=0, on_full="evict", evict="lfu", admit_after=2, unseen="share")
ROWS, DISTINCT = 24, 60
MOVES = [("npu:0", "npu:0"), ("npu:0", "npu:1"), ("npu:0", "cpu"), ("cpu", "npu:0")]


def trained(device: str, optimizer: str, begin: int, end: int) -> Training:
    training = Training.build(optimizer, EVICTS, ROWS, seed=begin)
    training.model.to(device)
    go_on(training, device, begin, end)
    return training


def go_on(training: Training, device: str, begin: int, end: int) -> None:
    for number in range(begin, end):
        step(training, make_batch(number, DISTINCT, raw=True).to(torch.device(device)))


@pytest.mark.parametrize(("source", "target"), MOVES)
@pytest.mark.parametrize("optimizer", KINDS)
def test_training_resumes(tmp_path: Path, optimizer: str, source: str, target: str) -> None:
    saved, loaded = trained(source, optimizer, 0, 4), trained(target, optimizer, 5, 7)
    saved.save(tmp_path)
    loaded.load(tmp_path)
    places = {parameter.device for parameter in loaded.model.parameters()}
    assert places == {torch.device(target)}
    assert_close(without_slots(loaded), without_slots(saved), rtol=0, atol=0)
    go_on(saved, source, 8, 10)
    go_on(loaded, target, 8, 10)
    assert_close(without_slots(loaded), without_slots(saved), rtol=1e-5, atol=1e-6)


def without_slots(training: Training) -> dict[str, object]:
    """All state but slot tables, which may be laid out in another order."""
    return {name: value for name, value in state_of(training).items() if not name.endswith("slot_groups")}
