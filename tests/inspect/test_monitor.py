"""``recfx.monitor``: the scalars of each interval. Those of several ranks are in ``tests/sharding/test_monitor.py``."""

import copy
import pickle
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import recfx
from recfx.inspect import monitor
from tests.builders.optimizers import attach
from tests.inspect.models import Towers, Wrapped, collection, config, dlrm
from tests.support.fake_group import fake_group
from tests.support.refusals import refused

T0, T1 = "inner.embedding_bags.t0", "inner.embedding_bags.t1"


def hashed(tables: int = 1, rows: int = 100, **settings: Any) -> nn.Module:
    model = Wrapped(collection(tables, rows=rows))
    attach(model, torch.optim.SGD, lr=0.1)
    return recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0, **settings), inplace=True)


def feed(model: nn.Module, *ids: list[int]) -> None:
    """One batch of one sample; one list of ids per table."""
    keys = [f"f{number}" for number in range(len(ids))]
    lengths = torch.tensor([len(of_key) for of_key in ids])
    pooled = model(
        KeyedJaggedTensor(keys, torch.tensor([id_ for one in ids for id_ in one], dtype=torch.int64), lengths=lengths)
    )
    if model.training:
        pooled.sum().backward()


def of(name: str, scalars: dict[str, float]) -> dict[str, float]:
    named = {tag.rpartition("/")[2]: value for tag, value in scalars.items() if tag.startswith(f"{name}/")}
    named = {tag: value for tag, value in named.items() if not isnan(value)}
    named.pop("longest_probe", None)
    return named


def test_an_interval_has_what_was_counted_in_it() -> None:
    model = hashed(2, buckets=1)
    feed(model, [7, 7, 8], [1])
    watched = recfx.monitor(model)
    assert watched.tables == (T0, T1)
    feed(model, [7, 9, 10, 10], [1])
    scalars = watched.scalars()
    assert of(T0, scalars) == {"occupancy": 0.04, "worst_bucket": 0.04, "insert_rate": 2 / 4}
    assert of(T1, scalars) == {"occupancy": 0.01, "worst_bucket": 0.01, "insert_rate": 0.0}
    assert of(T0, watched.scalars()) == {"occupancy": 0.04, "worst_bucket": 0.04}  # a rate over no ids is none
    model.eval()
    feed(model, [7, 500, 501, 502], [1])
    assert of(T0, watched.scalars()) == {"occupancy": 0.04, "worst_bucket": 0.04, "eval_unseen_rate": 3 / 4}


def test_the_fullest_bucket() -> None:
    model = hashed(rows=10, buckets=2)
    feed(model, [1, 2, 3])
    taken = model.inner.index("t0").bucket_taken.tolist()
    assert sum(taken) == 3
    assert of(T0, recfx.monitor(model).scalars()) == {"occupancy": 0.3, "worst_bucket": max(taken) / 5}


@pytest.mark.parametrize(
    ("on_full", "rates"),
    [("evict", {"insert_rate": 6 / 8, "evict_rate": 2 / 8}), ("share", {"insert_rate": 4 / 8, "shared_rate": 2 / 8})],
)
def test_a_full_table(on_full: Any, rates: dict[str, float]) -> None:
    model = hashed(rows=4, buckets=1, on_full=on_full)
    watched = recfx.monitor(model)
    feed(model, [1, 2, 3, 4])
    feed(model, [5, 6, 4, 4])
    assert of(T0, watched.scalars()) == {"occupancy": 1.0, "worst_bucket": 1.0, **rates}


def test_admission() -> None:
    model = hashed(buckets=1, admit_after=2)
    watched = recfx.monitor(model)
    feed(model, [1, 2, 3])
    rates = of(T0, watched.scalars())
    assert (rates["unseen_rate"], rates["admit_rate"], rates["insert_rate"], rates["occupancy"]) == (1.0, 0.0, 0.0, 0.0)
    feed(model, [1, 2, 4, 5])
    rates = of(T0, watched.scalars())
    assert (rates["unseen_rate"], rates["admit_rate"], rates["insert_rate"]) == (2 / 4, 2 / 4, 2 / 4)


def test_the_longest_probe_is_found_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hashed(2, rows=4096)
    feed(model, list(range(0, 4000 * 7919, 7919)), list(range(50)))
    exact = {name: model.inner.index(name).longest_probe() for name in ("t0", "t1")}
    assert exact["t0"] > exact["t1"] > 0
    monkeypatch.setattr(monitor, "_WINDOW", -(-model.inner.index("t0").slot_groups.size(0) // 4))
    watched = recfx.monitor(model)
    seen = [watched.scalars() for _ in range(8)]
    assert all(one.keys() == seen[0].keys() for one in seen)
    assert [isnan(one[f"{T1}/longest_probe"]) for one in seen] == [True] * 4 + [False] * 4
    assert seen[3][f"{T0}/longest_probe"] == seen[7][f"{T0}/longest_probe"] == exact["t0"]
    assert seen[7][f"{T1}/longest_probe"] == exact["t1"]
    model.inner.index("t0").reset()
    assert isnan(watched.scalars()[f"{T0}/longest_probe"])  # what was read of the state before is forgotten
    assert watched.scalars(probe_all=True)[f"{T1}/longest_probe"] == exact["t1"]


def test_counts_that_begin_anew_are_no_interval() -> None:
    model = hashed(buckets=1)
    watched = recfx.monitor(model)
    feed(model, [1, 2, 3])
    watched.scalars()
    model.inner.index("t0").reset()
    feed(model, [1])
    assert of(T0, watched.scalars()) == {"occupancy": 0.01, "worst_bucket": 0.01, "insert_rate": 1.0}
    feed(model, [1, 2])
    assert of(T0, watched.scalars())["insert_rate"] == 1 / 2


def by_state_dict(saved: nn.Module, model: nn.Module, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(saved.state_dict(), folder / "model.pt")
    model.load_state_dict(torch.load(folder / "model.pt"))


def by_assignment(saved: nn.Module, model: nn.Module, folder: Path) -> None:
    model.load_state_dict(copy.deepcopy(saved.state_dict()), assign=True)


def by_distributed_checkpoint(saved: nn.Module, model: nn.Module, folder: Path) -> None:
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    dcp.load(model.state_dict(), checkpoint_id=folder)


def by_checkpoint(saved: nn.Module, model: nn.Module, folder: Path) -> None:
    recfx.save_checkpoint(saved, folder / "saved")
    recfx.load_checkpoint(model, folder / "saved")


def through_meta(saved: nn.Module, model: nn.Module, folder: Path) -> None:
    model.to("meta").to_empty(device="cpu")
    by_state_dict(saved, model, folder)


LOADS = [by_state_dict, by_assignment, by_distributed_checkpoint, by_checkpoint, through_meta]


@pytest.mark.parametrize("before", [0, 45, 140])  # ids in training before the load: fewer than saved, or more
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_after_a_load_the_interval_begins_with_the_load(load: Any, before: int, tmp_path: Path) -> None:
    saved, model = hashed(rows=1000, buckets=1), hashed(rows=1000, buckets=1)
    feed(saved, list(range(100)))
    feed(saved, list(range(50)))
    feed(model, list(range(before)))
    watched = recfx.monitor(model)
    feed(model, list(range(before)))
    load(saved, model, tmp_path)
    state = {"occupancy": 0.1, "worst_bucket": 0.1}
    assert of(T0, watched.scalars()) == state  # what came before the load is of a state that is gone
    feed(model, list(range(before)))
    load(saved, model, tmp_path / "again")
    feed(model, [1, 2, 3, 1000])
    assert of(T0, watched.scalars()) == {"occupancy": 0.101, "worst_bucket": 0.101, "insert_rate": 1 / 4}
    feed(model, [1, 2])
    assert of(T0, watched.scalars())["insert_rate"] == 0.0


def test_a_load_that_was_interrupted_is_an_error() -> None:
    model = hashed()
    watched = recfx.monitor(model)
    model.inner.index("t0").expect_load()
    for ask in (watched.scalars, lambda: recfx.monitor(model)):
        with refused("load_interrupted", error=recfx.CheckpointError):
            ask()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_monitor_that_is_copied_with_its_model_goes_on(copied: Any) -> None:
    model = hashed(rows=1000, buckets=1)
    watched = recfx.monitor(model)
    feed(model, list(range(20)))
    again, watched_again = copied((model, watched))
    feed(again, list(range(30)))
    assert of(T0, watched_again.scalars())["insert_rate"] == 30 / 50
    assert of(T0, watched.scalars())["insert_rate"] == 1.0


def test_what_a_writer_gets() -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.scalars.append((tag, scalar_value, global_step))

    model, writer = hashed(2), Writer()
    watched, same = recfx.monitor(model), recfx.monitor(model)
    feed(model, [1, 2, 3], [4, 4])
    watched.log(writer, 17)
    assert writer.scalars == [(tag, pytest.approx(value, nan_ok=True), 17) for tag, value in same.scalars().items()]
    assert {type(value) for _, value, _ in writer.scalars} == {float}
    watched.log(None, 18)


def test_names_are_those_of_the_model_whatever_is_around_it() -> None:
    model, _ = dlrm()
    converted = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0))
    names = tuple(f"sparse_arch.embedding_bag_collection.embedding_bags.t{number}" for number in range(2))
    assert recfx.monitor(converted).tables == recfx.monitor(torch.compile(converted)).tables == names
    root = recfx.convert(collection(), hashing=recfx.HashConfig(dense_rows=0))
    assert recfx.monitor(root).tables == ("embedding_bags.t0", "embedding_bags.t1")
    both = nn.ModuleDict({"module": root, "_orig_mod": copy.deepcopy(root)})
    assert recfx.monitor(both).tables[0::2] == ("module.embedding_bags.t0", "_orig_mod.embedding_bags.t0")


def test_a_monitor_that_was_made_before_sharding_is_refused() -> None:
    model = recfx.convert(nn.ModuleDict({"ebc": collection()}), hashing=recfx.HashConfig(dense_rows=0))
    before = recfx.monitor(model)
    before.scalars()
    with fake_group(0, 1):
        sharded = DistributedModelParallel(model, device=torch.device("cpu"))
        with refused("monitor_before_sharding"):
            before.scalars()
        assert recfx.monitor(sharded).scalars().keys() == recfx.monitor(copy.deepcopy(model)).scalars().keys()


@pytest.mark.parametrize("hashing", [recfx.HashConfig(dense_rows=0), recfx.HashConfig.raw_ids(on_full="evict")])
def test_reports_and_monitors_use_the_names_of_the_user(hashing: recfx.HashConfig) -> None:
    """Under ``DistributedModelParallel``, which adds two modules, and where the user's own module is called so."""
    with fake_group(0, 1):
        model = nn.ModuleDict({"module": recfx.convert(nn.ModuleDict({"ebc": collection()}), hashing=hashing)})
        before, sharded = recfx.explain(model), DistributedModelParallel(model, device=torch.device("cpu"))
        report, names = recfx.explain(sharded), recfx.monitor(sharded).tables
    assert report.collections[0].paths == before.collections[0].paths == ("module.ebc",)
    assert names == recfx.monitor(model).tables == ("module.ebc.embedding_bags.t0", "module.ebc.embedding_bags.t1")
    assert (
        {reason.path for reason in before.reasons}
        <= {reason.path for reason in report.reasons}
        <= {"module.ebc", *names}
    )
    assert "wrapped" not in report.to_json()


def test_nothing_of_the_model_changes_and_nothing_is_hooked() -> None:
    model = hashed(2, buckets=1)
    feed(model, [1, 2], [3])
    state = copy.deepcopy(model.state_dict())
    attributes = [sorted(module.__dict__) for module in model.modules()]
    recfx.monitor(model).scalars(probe_all=True)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert [sorted(module.__dict__) for module in model.modules()] == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_an_index_cannot_be_watched() -> None:
    with refused("no_index", match="ids are rows"):
        recfx.monitor(recfx.convert(collection()))


def test_tables_on_meta_have_no_scalars() -> None:
    on_meta = recfx.HashEmbeddingBagCollection(tables=[config(0)], device=torch.device("meta"))
    assert recfx.monitor(on_meta).scalars() == {}


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Towers(), "no_collection"), (nn.Linear(1, 1), "no_collection"), ("model", "invalid_argument")],
)
def test_refusals(model: Any, reason: str) -> None:
    with refused(reason):
        recfx.monitor(model)


def test_a_group_is_one_of_torch() -> None:
    wrong: Any = "all"
    with refused("invalid_argument", match="group is a str"):
        recfx.monitor(recfx.convert(collection(1), hashing=recfx.HashConfig(dense_rows=0))).scalars(wrong)
