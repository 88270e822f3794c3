"""Training that finds rows where the tables are: bit for bit as on the host, whatever happens between two steps.

The cases run in Triton's interpreter (``interpreted/test_find_rows_in_models.py``) and on a simulated NPU
(``npu_runtime/test_finding_in_training.py``).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType

import recfx
from recfx.errors import InputError, TableFullError
from recfx.ir import format_graph
from recfx.kernels.index.slot_table import find_in_slots
from recfx.runtime import FindRows
from tests.ascend.finding_on_device import EXTREMES, Place
from tests.builders.batches import bags
from tests.builders.collections import table
from tests.builders.optimizers import attach

HASHING = {
    "error": recfx.HashConfig(dense_rows=0, buckets=2),
    "share": recfx.HashConfig(dense_rows=0, buckets=3, on_full="share", unseen="share", seed=-5),
    "dense": recfx.HashConfig(dense_rows=5, on_full="share"),
}


class Batch(NamedTuple):
    features: KeyedJaggedTensor
    last: KeyedJaggedTensor


class Model(nn.Module):
    """``last`` refuses a batch when ``first`` has been through with it. Ids of table ``s`` are rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        mean = PoolingType.MEAN
        tables = [table("a", ["f0", "f1"], dim=4, rows=rows), table("s", ["f2"], dim=4, rows=20)]
        self.first = EmbeddingBagCollection([*tables, table("b", ["f3"], dim=12, rows=rows, pooling=mean)])
        self.last = EmbeddingBagCollection([table("c", ["f4"], dim=4, rows=rows)])

    def forward(self, batch: Batch) -> torch.Tensor:
        return torch.cat([self.first(batch.features).values(), self.last(batch.last).values()], 1)


class Twins:
    """Two equal models on one device: ``host`` hashes on the host in training, ``there`` finds rows on the device.

    Args:
        place: of both.
        hashing: of the tables but ``s``.
        rows: of each of them.
    """

    def __init__(self, place: Place, hashing: recfx.HashConfig, rows: int) -> None:
        self.device = torch.device(place.device)
        torch.manual_seed(0)
        plain = Model(rows)
        attach(plain, "adagrad")
        asked = replace(hashing, find_on_device=True)
        self.host, self.there = (
            recfx.convert(copy.deepcopy(plain), hashing=dict.fromkeys("abc", config), backend=place.backend).to(
                self.device
            )
            for config in (hashing, asked)
        )
        self.host.load_state_dict(self.there.state_dict())
        assert ["inserts" in format_graph(model.first.graph_module) for model in self.models] == [False, True]

    @property
    def models(self) -> tuple[Any, Any]:
        return self.host, self.there

    def both(self, do: Callable[[Any], Any]) -> None:
        """Do something to both; what comes out, the states and the counts are the same."""
        results = []
        for model in self.models:
            try:
                results.append(do(model))
            except (TableFullError, InputError) as error:
                results.append((error.reason, str(error)))
        assert_equal(*results)
        assert_equal(*(model.state_dict() for model in self.models))
        for name in ("first", "last"):
            host, there = (model.get_submodule(name).hash_indexes for model in self.models)
            for key, index in host.items():
                assert there[key].counters == index.counters
                assert_equal(there[key].items(), index.items())
        self.check_copies()

    def check_copies(self) -> None:
        """What the copies are said to hold, they hold, and nothing else."""
        for node in finders(self.there):
            made: Any = node.copies._copy
            indexes = [index for index in node.hash_ids.indexes.by_table() if index is not None]
            if made is None or [version for version in made.versions if version] != [
                index.map_version for index in indexes
            ]:
                continue
            for number, (index, fields) in enumerate(zip(indexes, _of_indexes(made.indexes.facts), strict=True)):
                slots = made.indexes.slots.cpu()[fields[0] // 2 : fields[0] // 2 + fields[1] + 1]
                ids, rows = index.items()
                assert torch.equal(find_in_slots(ids, slots, made.indexes.side_rows.cpu()[number : number + 1]), rows)
                assert int((slots[:, 0] != -1).sum()) == int((ids != -1).sum())


def _of_indexes(facts: torch.Tensor) -> list[list[int]]:
    return [fields for fields in facts.tolist() if fields[1] >= 0]


def finders(model: nn.Module) -> list[FindRows]:
    return [node for node in model.modules() if isinstance(node, FindRows)]


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(actual, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            assert_equal(actual[key], expected[key])
    elif isinstance(actual, (tuple, list)):
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        assert actual == expected


def made_batch(draw: random.Random, universe: int, device: torch.device, *, refused: bool = False) -> Batch:
    """Bags of up to five ids, some of them extreme; perhaps none at all."""
    chosen = [*EXTREMES, *(number * 1_000_003 + 2 for number in range(universe))][:universe]
    most = draw.choice([0, 2, 5, 5])

    def ids(of: list[int]) -> list[list[int]]:
        return [draw.choices(of, k=draw.randint(0, most)) for _ in range(4)]

    features = bags({"f0": ids(chosen), "f1": ids(chosen), "f2": ids(list(range(20))), "f3": ids(chosen)})
    last = bags({"f5" if refused else "f4": ids(chosen)})
    return Batch(features.to(device), last.to(device))


def train(batch: Batch) -> Callable[[Any], torch.Tensor]:
    def step(model: Any) -> torch.Tensor:
        pooled: torch.Tensor = model.train()(batch)
        (pooled - 1).square().sum().backward()
        return pooled.detach()

    return step


def train_again(batch: Batch) -> Callable[[Any], torch.Tensor]:
    """Activation checkpointing runs the forward a second time."""

    def step(model: Any) -> torch.Tensor:
        pooled: torch.Tensor = checkpoint(model.train(), batch, use_reentrant=False)
        (pooled - 1).square().sum().backward()
        return pooled.detach()

    return step


def evaluate(batch: Batch) -> Callable[[Any], torch.Tensor]:
    def forward(model: Any) -> torch.Tensor:
        with torch.no_grad():
            pooled: torch.Tensor = model.eval()(batch)
            return pooled

    return forward


def _change(draw: random.Random, twins: Twins, universe: int, saved: list[Any]) -> None:
    """Something other than a training step that goes well."""
    device = twins.device
    kind = draw.choice(
        ["refused", "again", "evaluate", "on_host", "erase", "insert", "save", "load", "copy", "written"]
    )
    ids = torch.tensor(draw.sample(EXTREMES, 3))
    if kind == "refused":
        twins.both(train(made_batch(draw, universe, device, refused=True)))
    elif kind == "again":
        twins.both(train_again(made_batch(draw, universe, device)))
    elif kind == "evaluate":
        twins.both(evaluate(made_batch(draw, 2 * universe, device)))
    elif kind == "on_host":
        twins.both(train(made_batch(draw, universe, torch.device("cpu"))))
    elif kind == "erase":
        twins.both(lambda model: model.first.index("a").erase(ids))
    elif kind == "insert":
        twins.both(lambda model: model.first.index("b").find_or_insert(ids))
    elif kind == "save":
        saved[:] = [copy.deepcopy(model.state_dict()) for model in twins.models]
    elif kind == "load" and saved:
        states = dict(zip(map(id, twins.models), saved, strict=True))
        twins.both(lambda model: str(model.load_state_dict(states[id(model)])))
    elif kind == "copy":
        twins.host, twins.there = (copy.deepcopy(model) for model in twins.models)
    elif kind == "written" and saved:  # as torch.distributed.checkpoint loads
        for model, state in zip(twins.models, saved, strict=True):
            for name, value in model.state_dict().items():
                value.copy_(state[name])


def _history(place: Place, policy: str, seed: int, steps: int) -> None:
    draw = random.Random(f"{policy} {seed}")
    rows = draw.choice([12, 40])
    twins = Twins(place, HASHING[policy], rows)
    universe, saved = draw.choice([8, 30, 60]), list[Any]()
    for _ in range(steps):
        twins.both(train(made_batch(draw, universe, twins.device)))
        if draw.random() < 0.6:
            _change(draw, twins, universe, saved)


def histories(place: Place) -> None:
    """Histories of each policy, in tables that have room and in tables that are full."""
    is_interpreted = place.device == "cpu"  # which takes many times as long
    for policy in HASHING:
        for seed in range(1 if is_interpreted else 4):
            _history(place, policy, seed, 4 if is_interpreted else 14)


def one_copy(place: Place) -> None:
    """Batches with new ids, with none, and of either mode, do not copy the indexes again; nor does a refused one."""
    twins, draw = Twins(place, HASHING["error"], 80), random.Random(0)
    reads: list[int] = []
    for node in finders(twins.there):
        read = node.copies._read
        node.copies._read = lambda *args, read=read: [reads.append(1), read(*args)][1]  # type: ignore[method-assign]
    for number in range(4):
        batch = made_batch(draw, 10 + 8 * number, twins.device)
        twins.both(train(batch))
        twins.both(train(batch))
        twins.both(evaluate(made_batch(draw, 60, twins.device)))
    assert len(reads) == 2
    assert all(len(index) > 10 for index in twins.there.first.hash_indexes.values())
    twins.both(train(made_batch(draw, 60, twins.device, refused=True)))
    assert len(reads) == 2


def only_new_ids_go_to_the_host(place: Place) -> None:
    """And of these, each occurrence."""
    twins = Twins(place, HASHING["error"], 40)
    asked: list[list[int]] = []
    for node in finders(twins.there):
        insert = node.hash_ids.indexes.find_or_insert
        node.hash_ids.indexes.find_or_insert = (  # type: ignore[method-assign]
            lambda ids, *rest, insert=insert: [asked.append(ids.tolist()), insert(ids, *rest)][1]
        )

    def batch(first: list[int], second: list[int]) -> Batch:
        features = bags({"f0": [first], "f1": [second], "f2": [[3]], "f3": [[-1, -1]]})
        return Batch(features.to(twins.device), bags({"f4": [[]]}).to(twins.device))

    twins.both(train(batch([7, 8, 7], [9])))
    twins.both(train(batch([8, 7], [9, 9])))
    twins.both(train(batch([10, 8, -1, 10], [7, -1])))
    assert asked == [[7, 8, 7, 9, -1, -1], [10, -1, 10, -1]]


CASES: dict[str, Callable[[Place], None]] = {
    case.__name__: case for case in (histories, one_copy, only_new_ids_go_to_the_host)
}
