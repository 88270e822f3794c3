"""What rows an eviction takes follows from the calls that all ranks make.

Random histories of training calls are played on several ranks and unsharded, and must leave the same state, to the bit.
All ranks make the same calls; what differs between them is what must not matter: which outputs they keep, and when
their garbage collector runs. Losses are sums and learning rates powers of two, so sums do not depend on their order.
"""

import gc
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import recfx
from recfx.errors import InputError, TableFullError
from tests.sharding.cases import FORMS, Case, Table, batches, concatenate, values_of
from tests.sharding.ranks import ranks
from tests.sharding.stateful import assert_same, make, model_state, optimizer_state, whole_state

PARTS = 4  # samples of a global batch, dealt out to the ranks in order

_SHARDINGS = (
    ("table_wise", 1),
    ("row_wise",),
    ("column_wise", 0, 1),
    ("table_column_wise", 1, 0),
    ("data_parallel",),
    ("table_row_wise", 0),
)
_WIDE = (*_SHARDINGS, ("grid_shard", 0, 1), ("grid_shard", 1, 0))
_KINDS = {
    "train": 8,
    "skip": 3,
    "detach": 1,
    "without gradients": 1,
    "evaluate": 1,
    "evaluate with gradients": 1,
    "evaluate and train": 1,
    "ahead": 3,
    "catch up": 3,
    "accumulate": 1,
    "twice": 1,
    "late again": 1,
    "recfx pipeline": 1,
    "torchrec pipeline": 1,
}


@dataclass(frozen=True)
class Event:
    """One call or a few. ``kept_on``: the ranks that keep its output for ever. ``number``: of something, by kind."""

    kind: str
    kept_on: str
    number: int
    collect_on: int


@dataclass(frozen=True)
class History:
    """A case and what happens to it: events, cut where the state is saved and loaded by new models."""

    case: Case
    parts: tuple[tuple[Event, ...], ...]
    collector: str
    seed: int


def history_of(seed: int, world_size: int, form: str = "pooled") -> History:
    choose = random.Random(seed)
    tables = tuple(
        Table(name, 64, dim, features, "SUM", choose.choice(_WIDE if dim == 256 else _SHARDINGS))
        for name, dim, features in (("a", 8, ("f0",)), ("b", 8, ("f1", "f0")), ("c", 16, ("f2",)), ("d", 256, ("f3",)))
    )
    evict: Any = choose.choice(["lru", "lfu", "ttl"])
    hashing = recfx.HashConfig(
        dense_rows=choose.choice([0, 3]),
        rows=67,
        buckets=choose.choice([1, 2]) if world_size < 4 else 4,
        on_full="evict",
        evict=evict,
        ttl_batches=choose.choice([1, 3]) if evict == "ttl" else None,
        admit_after=choose.choice([1, 1, 2]),
    )
    case = Case(
        tables,
        optimizer=choose.choice(["dyadic_sgd", "dyadic_adagrad"]),
        local_size=2 if world_size == 4 else 0,
        hashing=hashing,
        raw_ids=choose.choice([120, 400]),
        sizes=(1,),
        seed=seed,
    )
    kinds, weights = zip(*_KINDS.items(), strict=True)
    events = [
        Event(
            choose.choices(kinds, weights)[0],
            choose.choice(["none", "rank 0", "rank 1", "all"]),
            choose.randrange(6),
            choose.randrange(2 * world_size),
        )
        for _ in range(choose.randrange(20, 50))
    ]
    cuts = sorted(choose.sample(range(len(events)), choose.randrange(3)))
    edges = [0, *cuts, len(events)]
    parts = tuple(tuple(events[begin:end]) for begin, end in itertools.pairwise(edges))
    case = FORMS[form](case)
    if case.dedup is True:  # an index that evicts counts every sight of an id
        case = replace(case, hashing=None, raw_ids=0)
    return History(case, parts, choose.choice(["off", "on", "often"]), seed)


class Summed(nn.Module):
    def __init__(self, sparse: nn.Module, scale: int) -> None:
        super().__init__()
        self.sparse, self.scale = sparse, scale
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = values_of(self.sparse(features))
        return values.sum() * self.scale, values.detach()


class Player:
    """Plays a part of a history on one rank; ``world_size=0``: unsharded, with the samples of all."""

    def __init__(self, history: History, rank: int, world_size: int, state: dict[str, torch.Tensor] | None) -> None:
        self.rank, self.world_size = rank, world_size
        self.sparse: Any = make(history.case, world_size).get_submodule("sparse")
        if state is not None:
            self.sparse.load_state_dict(model_state(state))
            saved = optimizer_state(state)
            if saved["state"]:  # SGD has none
                self.sparse.fused_optimizer.load_state_dict(saved)
        self.model = Summed(self.sparse, max(world_size, 1))
        self.waiting: list[torch.Tensor] = []  # losses whose backward comes later
        self.kept: list[Any] = []

    def play(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        """``given``: batches of the event."""
        getattr(self, "_" + event.kind.replace(" ", "_"))(event, steps)

    def _loss(self, event: Event, features: KeyedJaggedTensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(features)[0]
        if event.kept_on == "all" or event.kept_on == f"rank {self.rank}":
            self.kept.append(loss)
        return loss

    def _train(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        self._loss(event, steps[0]).backward()

    def _skip(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        self._loss(event, steps[0])

    def _detach(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        self.kept.append(self._loss(event, steps[0]).detach())

    def _without_gradients(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        with torch.no_grad():
            self._loss(event, steps[0])

    def _evaluate(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        self.model.eval()
        self._without_gradients(event, steps)
        self.model.train()

    def _evaluate_with_gradients(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        self.model.eval()
        loss = self._loss(event, steps[0])
        self.model.train()
        if event.number < 2:
            self.waiting.append(loss)

    def _evaluate_and_train(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        self.model.eval()
        self._loss(event, steps[0]).backward()
        self.model.train()

    def _ahead(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        self.waiting.append(self._loss(event, steps[0]))

    def _catch_up(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        for loss in self.waiting[:: -1 if event.number == 0 else 1]:
            loss.backward()
        self.waiting.clear()

    def _accumulate(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        losses = [self._loss(event, features) for features in steps[: 1 + event.number % 4]]
        torch.stack(losses).sum().backward()

    def _twice(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        loss = self._loss(event, steps[0])
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        if event.number < 3:
            self.waiting.append(loss)

    def _late_again(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        if self.waiting:
            self.waiting[event.number % len(self.waiting)].backward(retain_graph=True)

    def _recfx_pipeline(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        self._pipeline(recfx.TrainPipeline, steps)

    def _torchrec_pipeline(self, event: Event, steps: list[KeyedJaggedTensor]) -> None:
        self._pipeline(TrainPipelineSparseDist, steps)

    def _pipeline(self, kind: Any, steps: list[KeyedJaggedTensor]) -> None:
        optimizer = torch.optim.SGD([self.model.unused], lr=0.5)
        if self.world_size == 0:
            for features in steps:
                self.model(features)[0].backward()
            return
        pipeline, data = kind(self.model, optimizer, torch.device("cpu")), iter(steps)
        for _ in steps:
            pipeline.progress(data)
        if hasattr(pipeline, "detach"):
            pipeline.detach()


def played(
    rank: int, world_size: int, history: History, number: int, state: dict[str, torch.Tensor] | None
) -> tuple[int, dict[str, torch.Tensor]]:
    """One part of a history: how many of its events come before a backward that is refused, and the whole state."""
    player = Player(history, rank, world_size, state)
    steps = batches(replace(history.case, seed=100 * history.seed + number), PARTS, 4 * len(history.parts[number]))
    share = PARTS // max(world_size, 1)
    mine = [concatenate(step[rank * share : (rank + 1) * share]) for step in steps]
    thresholds = gc.get_threshold()
    if world_size and history.collector == "off":
        gc.disable()
    if world_size and history.collector == "often" and rank == history.seed % world_size:
        gc.set_threshold(20, 2, 2)
    try:
        for position, event in enumerate(history.parts[number]):
            if world_size and event.collect_on == rank:
                gc.collect()
            player.play(event, mine[4 * position : 4 * position + 4])
    except InputError as error:
        if world_size or error.reason != "backward_after_eviction":
            raise
        return position, {}
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
    return len(history.parts[number]), whole_state(player.model)


def compare(history: History, world_sizes: list[int]) -> str:
    """Play it unsharded and on ranks, the parts on these numbers of ranks in turn. Returns what happened.

    A part ends before a backward that is refused, because ranks do not go on after it.

    Raises:
        AssertionError: it did not leave the same state.
    """
    state: dict[str, torch.Tensor] | None = None
    evicted, refusals = 0, 0
    for number in range(len(history.parts)):
        try:
            events, expected = played(0, 0, history, number, state)
            if not expected:
                parts = list(history.parts)
                parts[number], refusals = parts[number][:events], refusals + 1
                history = replace(history, parts=tuple(parts))
                _, expected = played(0, 0, history, number, state)
        except TableFullError:
            return "a table is too small"
        world_size = world_sizes[number % len(world_sizes)]
        for _, trained in ranks(world_size).run(played, history, number, state):
            assert_same(trained, expected)
        state = expected
        evicted += sum(int(value[3]) for name, value in expected.items() if name.endswith(".counts"))
    return f"{evicted} evicted, {refusals} backwards refused"


HISTORIES = [(seed, [2, 1]) for seed in range(6)] + [(seed, [4, 2]) for seed in range(40, 43)]


@pytest.mark.parametrize(
    ("seed", "world_sizes", "form"), [(*history, list(FORMS)[number % 3]) for number, history in enumerate(HISTORIES)]
)
def test_the_same_calls_leave_the_same_state(seed: int, world_sizes: list[int], form: str) -> None:
    assert compare(history_of(seed, world_sizes[0], form), world_sizes) != "a table is too small"
