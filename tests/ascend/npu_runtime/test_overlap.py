"""``recfx.TrainPipeline`` hashes the ids of the next batch on the host while the device computes a batch.

Kernels of a simulated NPU run within the call that asks for them. So that "while" can be seen, the backward on the main
thread and the hashing on the pipeline's thread wait for each other: hashing in turn would wait in vain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.runtime import FindIds, HashIds, InsertIds, Lookup, ToDevice, ToHost
from tests.ascend.npu_runtime.training import DEVICE
from tests.builders.collections import table
from tests.builders.optimizers import attach

PATIENCE = 20.0  # seconds, after which two threads have not met
STEPS = 5
HASHING = {
    "raw": recfx.HashConfig(dense_rows=0),
    "evict": recfx.HashConfig(dense_rows=0, on_full="evict"),
}


class Event(NamedTuple):
    """What happened, to which batch, on the main thread or the pipeline's, and on the stream of the forward or not."""

    what: str
    batch: int
    ahead: bool
    own_stream: bool


class Model(nn.Module):
    def __init__(self, hashing: recfx.HashConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        plain = EmbeddingBagCollection([table("t0", ["f0"], rows=64, dim=4), table("t1", ["f1"], rows=64, dim=4)])
        attach(plain, "adagrad")
        self.ebc = recfx.convert(plain, hashing=hashing)
        self.over = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.over(self.ebc(features).values())
        return (output - 1).square().mean(), output.detach()


def make(number: int) -> KeyedJaggedTensor:
    """Ids by which a batch is known; half of them are also in the batch before."""
    ids = torch.arange(8) + 4 * number + 2**40
    return KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.full((8,), 1))


def number_of(features: Any) -> int:
    return (int(features.values()[0]) - 2**40) // 4


class Watch:
    """Notes the nodes' calls, with the batch that they are for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        self.meet: threading.Barrier | None = None
        self.current = -1  # the batch of the step
        for kind, what in (
            (ToHost, "to_host"),
            (FindIds, "hash"),
            (InsertIds, "insert"),
            (HashIds, "hash"),
            (ToDevice, "to_device"),
            (Lookup, "lookup"),
        ):
            patch.setattr(kind, "forward", self._noting(kind.forward, what))

    def note(self, what: str, number: int) -> None:
        ahead = threading.current_thread() is not threading.main_thread()
        default = torch.npu.default_stream(torch.device(DEVICE))
        self.events.append(Event(what, number, ahead, torch.npu.current_stream() != default))

    def _noting(self, original: Callable[..., Any], what: str) -> Callable[..., Any]:
        def forward(module: Any, features: Any, *args: Any) -> Any:
            number = self.current if what in ("to_device", "lookup") else number_of(features)
            self.note(what, number)
            if what == "hash":
                self._meet_ahead()
            return original(module, features, *args)

        return forward

    def _meet_ahead(self) -> None:
        if self.meet is not None and threading.current_thread() is not threading.main_thread():
            self.meet.wait(PATIENCE)

    def backward(self, model: nn.Module) -> None:
        """Note the backward of each batch, and let it meet whoever hashes meanwhile."""

        def begin(module: nn.Module, gradients: Any) -> None:
            self.note("backward", self.current)
            if self.meet is not None and self.current < STEPS - 1:
                self.meet.wait(PATIENCE)

        model.over.register_full_backward_pre_hook(begin)

    def of(self, *kinds: str) -> list[tuple[str, int]]:
        return [(event.what, event.batch) for event in self.events if event.what in kinds]


def run(hashing: recfx.HashConfig, watch: Watch | None, drive: Callable[..., Iterator[torch.Tensor]]) -> list[Any]:
    model = Model(hashing).to(DEVICE)
    if watch is not None:
        watch.backward(model)
    optimizer = torch.optim.SGD(model.over.parameters(), lr=0.1)
    outputs = [output.cpu() for output in drive(model, optimizer, watch)]
    states = {name: value.cpu() for name, value in model.state_dict().items()}
    return [*outputs, *states.values()]


def plain(model: Model, optimizer: torch.optim.Optimizer, watch: Watch | None) -> Iterator[torch.Tensor]:
    for number in range(STEPS):
        optimizer.zero_grad()
        loss, output = model(make(number).to(torch.device(DEVICE)))
        loss.backward()
        optimizer.step()
        yield output


def piped(model: Model, optimizer: torch.optim.Optimizer, watch: Watch | None) -> Iterator[torch.Tensor]:
    pipeline = recfx.TrainPipeline(model, optimizer, DEVICE)
    source = iter([make(number) for number in range(STEPS)])
    for number in range(STEPS):
        if watch is not None:
            watch.current = number
        yield pipeline.progress(source)
    (report,) = pipeline.report()
    evicts = bool(model.ebc.hashed_in_turn())
    assert (report.path, report.pipelined, report.why and report.why.code) == (
        "ebc",
        True,
        "hashed_in_turn" if evicts else None,
    )


def test_the_next_batch_is_hashed_while_a_batch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(HASHING["raw"], None, plain)
    watch = Watch(monkeypatch)
    watch.meet = threading.Barrier(2)
    outputs = run(HASHING["raw"], watch, piped)
    assert all(torch.equal(mine, other) for mine, other in zip(outputs, expected, strict=True))
    # The first batch shows how the model calls the collection.
    for number in range(1, STEPS):
        order = [event for event in watch.events if event.batch == number]
        assert [event.what for event in order] == ["to_host", "hash", "insert", "to_device", "lookup", "backward"]
        assert [event.ahead for event in order[:5]] == [True, True, False, False, False]
        assert [event.own_stream for event in order[:5]] == [True, True, False, False, False]
        positions = {event: position for position, event in enumerate(watch.of("hash", "backward", "lookup"))}
        # Between the forward of the batch before and its update: both threads were there at the same time.
        assert positions["lookup", number - 1] < positions["hash", number] < positions["lookup", number]
    assert watch.of("insert") == [("insert", number) for number in range(1, STEPS)]
