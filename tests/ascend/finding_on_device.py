"""What eval mode has to do where rows are found on a device: as the same model on the host, whatever happened before.

The cases run in Triton's interpreter (``interpreted/test_find_rows_in_models.py``) and on a simulated NPU
(``npu_runtime/test_find_rows.py``).
"""

import copy
import random
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType

import recfx
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.ir import format_graph
from tests.builders.batches import bags
from tests.builders.collections import table
from tests.builders.optimizers import attach

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # sums are in another order
EXTREMES = [0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63)]

HASHING = {
    "zeros": recfx.HashConfig(dense_rows=0),
    "share": recfx.HashConfig(dense_rows=0, unseen="share"),
    "buckets": recfx.HashConfig(dense_rows=0, unseen="share", buckets=3, seed=-5),
    "row": recfx.HashConfig(dense_rows=0, unseen="row", buckets=3),
    "dense": recfx.HashConfig(dense_rows=5, unseen="share", seed=2**63 - 2),
    "dense zeros": recfx.HashConfig(dense_rows=5),
    "evict": recfx.HashConfig(dense_rows=0, on_full="evict"),
    "admit": recfx.HashConfig(dense_rows=0, on_full="evict", admit_after=2),
    "full": recfx.HashConfig(dense_rows=0, on_full="share", unseen="share"),
}


class Place(NamedTuple):
    """Where the model is that finds rows on a device.

    Args:
        device: of the tables.
        backend: the one that is asked for.
    """

    device: str
    backend: str = "auto"


class Pair:
    """The same collection twice: ``host`` finds rows on the host, ``there`` where its tables are.

    Args:
        place: of the second one.
        hashing: of tables ``t0`` and ``t1``; ``t2`` is adopted if ``adopted``.
        weighted: whether ids have weights; otherwise ``t1`` is averaged.
        adopted: whether the last table is adopted.
    """

    def __init__(self, place: Place, hashing: recfx.HashConfig, weighted: bool = False, adopted: bool = False) -> None:
        torch.manual_seed(0)
        self.place = place
        pooling = PoolingType.SUM if weighted else PoolingType.MEAN
        tables = [table("t0", ["f0", "f1"], rows=30), table("t1", ["f2"], dim=12, rows=30, pooling=pooling)]
        tables.append(table("t2", ["f3"], rows=20))
        plain = EmbeddingBagCollection(tables, is_weighted=weighted)
        other = copy.deepcopy(plain)
        for model in (plain, other):
            attach(model, "adagrad")
        policies = {"t0": hashing, "t1": hashing, "t2": recfx.HashConfig() if adopted else hashing}
        self.weighted, self.adopted = weighted, adopted
        self.host: HashEmbeddingBagCollection = recfx.convert(other, hashing=policies, backend="reference")
        self.there: HashEmbeddingBagCollection = recfx.convert(plain, hashing=policies, backend=place.backend)
        self.there.load_state_dict(self.host.state_dict())
        self.there.to(place.device)

    def batch(self, seed: int, ids: int, samples: int = 4) -> KeyedJaggedTensor:
        """Bags of up to four ids, some of them extreme."""
        draw = torch.Generator().manual_seed(seed)
        chosen = torch.cat([torch.tensor(EXTREMES), torch.arange(max(0, ids - len(EXTREMES))) * 1_000_003 + 2])[:ids]
        features = {}
        for feature in ("f0", "f1", "f2", "f3"):
            lengths = torch.randint(0, 5, (samples,), generator=draw).tolist()
            drawn = [torch.randint(0, ids, (length,), generator=draw) for length in lengths]
            rows = self.adopted and feature == "f3"
            features[feature] = [(numbers % 20 if rows else chosen[numbers]).tolist() for numbers in drawn]
        made = bags(features)
        weights = torch.rand(made.values().numel(), generator=draw) if self.weighted else None
        return KeyedJaggedTensor(made.keys(), made.values(), weights, lengths=made.lengths(), stride=samples)

    def train(self, seed: int, ids: int = 20) -> None:
        """One step of both."""
        features = self.batch(seed, ids)
        for model, device in ((self.host, "cpu"), (self.there, self.place.device)):
            model.train()
            pooled = model(features.to(torch.device(device))).values()
            (pooled - 1).square().sum().backward()

    def compare(self, features: KeyedJaggedTensor | None = None, ids_on: str = "") -> None:
        """Outputs of one eval forward, and all counters."""
        features = self.batch(99, 40) if features is None else features
        place = torch.device(ids_on or self.place.device)
        with torch.no_grad():
            expected = self.host.eval()(features).values()
            actual = self.there.eval()(features.to(place)).values()
        assert actual.device.type == torch.device(self.place.device).type
        assert "find_rows(" in format_graph(self.there.graph_module)
        torch.testing.assert_close(actual.cpu(), expected, **CLOSE)
        for name in self.host.hash_indexes:
            assert self.there.index(name).counters == self.host.index(name).counters


def policies(place: Place) -> None:
    for number, hashing in enumerate(HASHING.values()):
        pair = Pair(place, hashing, weighted=number % 2 == 1, adopted=number % 3 > 0)
        pair.compare()
        for seed in range(2):
            pair.train(seed)
        pair.compare()
        pair.compare(ids_on="cpu")


def changes(place: Place) -> None:
    """After each, the copies are those of the index as it is now."""
    pair = Pair(place, HASHING["zeros"])
    pair.train(0, 10)
    pair.compare()
    state, there = copy.deepcopy(pair.host.state_dict()), copy.deepcopy(pair.there.state_dict())
    pair.train(1)
    pair.compare()
    models = (pair.host, pair.there)
    for model in models:
        model.index("t0").erase(torch.tensor([-1, 0, 2**63 - 1]))
    pair.compare()
    for model in models:
        model.index("t1").insert(torch.tensor([777, 778]))
    pair.compare(bags({"f0": [[0]], "f1": [[1]], "f2": [[777, 778]], "f3": [[2]]}))
    for model, saved in zip(models, (state, there), strict=True):
        model.load_state_dict(saved)
    pair.compare()
    pair.train(1)
    pair.compare()
    for model, saved in zip(models, (state, there), strict=True):  # as torch.distributed.checkpoint loads
        now = model.state_dict()
        for name, value in saved.items():
            now[name].copy_(value)
    pair.compare()
    now = [model.state_dict() for model in models]
    before = copy.deepcopy(now)
    for model in models:
        model.index("t0").erase(torch.tensor([-1, 0, 1]))
    pair.compare()
    for written, saved in zip(now, before, strict=True):  # gives no row to any id
        for name, value in saved.items():
            written[name].copy_(value)
    pair.compare()
    for model in models:
        model.index("t0").reset()
    pair.compare()
    for model in models:
        torch.manual_seed(1)
        model.cpu().reset_parameters()
    pair.there.to(place.device)
    pair.compare()


def evicted(place: Place) -> None:
    """More ids than rows; rows of an eval forward whose backward trains them keep their ids until then."""
    pair = Pair(place, HASHING["evict"])
    for seed in range(6):
        pair.train(seed, 60)
        pair.compare(pair.batch(seed, 60))
    features = pair.batch(3, 60)
    pooled = []
    for model, device in ((pair.host, "cpu"), (pair.there, place.device)):
        pooled.append(model.eval()(features.to(torch.device(device))).values())
    pair.train(20, 50)
    for output in pooled:
        output.square().sum().backward()
    pair.compare()
    for name in ("t0", "t1", "t2"):
        torch.testing.assert_close(pair.there.weight(name).cpu(), pair.host.weight(name), **CLOSE)


def checkpointed(place: Place) -> None:
    """The forward of an eval mode with gradients runs twice, and finds the same rows."""
    for hashing in ("zeros", "evict"):
        pair = Pair(place, HASHING[hashing])
        for seed in range(3):
            pair.train(seed, 25)
        features = pair.batch(1, 60)
        for model, device in ((pair.host, "cpu"), (pair.there, place.device)):
            model.eval()
            pooled = checkpoint(_pooled, model, features.to(torch.device(device)), use_reentrant=False)
            pooled.square().sum().backward()
        pair.compare()
        for name in ("t0", "t1", "t2"):
            torch.testing.assert_close(pair.there.weight(name).cpu(), pair.host.weight(name), **CLOSE)


def _pooled(model: HashEmbeddingBagCollection, features: KeyedJaggedTensor) -> torch.Tensor:
    return model(features).values()


def empty(place: Place) -> None:
    pair = Pair(place, HASHING["zeros"])
    pair.train(0)
    pair.compare(bags({"f0": [[], []], "f1": [[], []], "f2": [[], []], "f3": [[], []]}))
    nothing = torch.zeros(0, dtype=torch.int64)
    pair.compare(KeyedJaggedTensor(["f0", "f1", "f2", "f3"], nothing, lengths=nothing, stride=0))


def threads(place: Place) -> None:
    """Several threads evaluate one model while the user inserts ids: every answer is that of before or after."""
    pair = Pair(place, HASHING["zeros"])
    pair.train(0)
    index, there = pair.there.index("t0"), pair.there.eval()
    features = pair.batch(1, 20).to(torch.device(place.device))
    with torch.no_grad():
        expected = there(features).values().cpu()
    failures: list[str] = []

    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(5):
                output = there(features).values().cpu()
                if not torch.allclose(output, expected, **CLOSE):
                    failures.append(str(output - expected))

    running = [threading.Thread(target=evaluate) for _ in range(3)]
    for thread in running:
        thread.start()
    for number in range(3):
        index.insert(torch.tensor([10**12 + number]))
    for thread in running:
        thread.join()
    assert not failures
    seen = sum(pair.there.index(name).counters["ids_seen"] for name in ("t0", "t1", "t2"))
    trained = sum(pair.host.index(name).counters["ids_seen"] for name in ("t0", "t1", "t2"))
    assert seen == trained + 3 + 16 * features.values().numel()


def histories(place: Place) -> None:
    """Whatever happens in whatever order: rows, counters and errors are those of the host, and all bits those of the
    same model on the device with ids that go to the host.
    """
    for number, name in enumerate(("zeros", "buckets", "row", "dense", "full")):
        draw = random.Random(number)
        pair = Pair(place, HASHING[name], weighted=number % 2 == 1, adopted=number % 3 > 0)
        twin = copy.deepcopy(pair.there)
        twin.graph_module.find_rows.hash_ids.indexes.counts_every_id = True
        models = (pair.host, pair.there, twin)
        states = [copy.deepcopy(model.state_dict()) for model in models]
        for seed in range(10):
            action = draw.choice(("train", "train", "train", "eval", "erase", "insert", "save", "load"))
            ids = draw.choice((8, 12, 20, 50))  # there are 20 to 30 rows
            features, said = pair.batch(draw.randrange(4), ids), list[object]()
            for index, model in enumerate(models):
                device = torch.device("cpu" if model is pair.host else place.device)
                if action in ("train", "eval"):
                    said.append(outcome(model.train(action == "train"), features.to(device)))
                elif action == "erase":
                    said.append(model.index("t0").erase(features["f0"].values()).tolist())
                elif action == "insert":
                    said.append(model.index("t0").insert(torch.tensor([-1, 900 + seed])).rows.tolist())
                elif action == "save":
                    states[index] = copy.deepcopy(model.state_dict())
                else:
                    model.load_state_dict(states[index])
            assert not said or said[1:] == said[:1] * 2, (name, seed, action)
            assert pair.there.train().graph_module.find_rows.serves_training
            for table_name, expected in pair.host.hash_indexes.items():
                for index in (pair.there.index(table_name), twin.index(table_name)):
                    assert index.counters == expected.counters, (name, seed, action)
                    assert torch.equal(index.row_ids, expected.row_ids)
                    assert torch.equal(index.row_state, expected.row_state)
            for table_name in ("t0", "t1", "t2"):
                weight = pair.there.weight(table_name)
                assert torch.equal(weight, twin.weight(table_name)), (name, seed, action)
                torch.testing.assert_close(weight.cpu(), pair.host.weight(table_name), **CLOSE)


def outcome(model: HashEmbeddingBagCollection, features: KeyedJaggedTensor) -> str:
    """The error of a step, or of a forward in eval mode; ``""`` if there is none."""
    try:
        with torch.set_grad_enabled(model.training):
            pooled = model(features).values()
    except recfx.errors.TableFullError as error:
        return str(error)
    if model.training:
        (pooled - 1).square().sum().backward()
    return ""


CASES: dict[str, Callable[[Place], None]] = {
    case.__name__: case for case in (policies, changes, evicted, checkpointed, empty, threads, histories)
}
