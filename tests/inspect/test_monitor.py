"""``recfx.monitor``: the scalars of each interval. Those of several ranks are in ``tests/sharding/test_monitor.py``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from recfx.inspect import index_health
from tests.builders.optimizers import attach
from tests.inspect.models import Towers, Wrapped, collection, config, dlrm

T0, T1 = "inner.embedding_bags.t0", "inner.embedding_bags.t1"


def hashed(tables: int = 1, rows: int = 100, **settings: Any) -> nn.Module:
    model = Wrapped(collection(tables, rows=rows))
    attach(model, torch.optim.SGD, lr=0.1)
    return recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0, **settings), inplace=True)


def feed(model: nn.Module, *ids: list[int]) -> None:
    """One batch of one sample; one list of ids per table."""
    keys = [f"f{number}" for number in range(len(ids))]
    lengths = torch.tensor([len(each) for each in ids])
    pooled = model(KeyedJaggedTensor(keys, torch.tensor([each for one in ids for each in one]), lengths=lengths))
    if model.training:
        pooled.sum().backward()


def of(name: str, scalars: dict[str, float]) -> dict[str, float]:
    """Those of one table, without the probe."""
    found = {tag.rpartition("/")[2]: value for tag, value in scalars.items() if tag.startswith(f"{name}/")}
    found.pop("longest_probe", None)
    return found


def test_an_interval_has_what_was_counted_in_it() -> None:
    model = hashed(2, buckets=1)
    feed(model, [7, 7, 8], [1])
    watched = recfx.monitor(model)
    assert watched.tables == (T0, T1)
    feed(model, [7, 9, 10, 10], [1])
    found = watched.scalars()
    assert of(T0, found) == {"occupancy": 0.04, "worst_bucket": 0.04, "insert_rate": 2 / 4}
    assert of(T1, found) == {"occupancy": 0.01, "worst_bucket": 0.01, "insert_rate": 0.0}
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


def test_eviction() -> None:
    model = hashed(rows=4, buckets=1, on_full="evict")
    watched = recfx.monitor(model)
    feed(model, [1, 2, 3, 4])
    feed(model, [5, 6, 4, 4])
    assert of(T0, watched.scalars()) == {
        "occupancy": 1.0, "worst_bucket": 1.0, "insert_rate": 6 / 8, "evict_rate": 2 / 8,
    }  # fmt: skip


def test_sharing() -> None:
    model = hashed(rows=4, buckets=1, on_full="share")
    watched = recfx.monitor(model)
    feed(model, [1, 2, 3, 4, 5, 5, 6, 1])
    assert of(T0, watched.scalars())["shared_rate"] == 3 / 8


def test_admission() -> None:
    model = hashed(buckets=1, admit_after=2)
    watched = recfx.monitor(model)
    feed(model, [1, 2, 3])
    found = of(T0, watched.scalars())
    assert (found["unseen_rate"], found["admit_rate"], found["insert_rate"], found["occupancy"]) == (1.0, 0.0, 0.0, 0.0)
    feed(model, [1, 2, 4, 5])
    found = of(T0, watched.scalars())
    assert (found["unseen_rate"], found["admit_rate"], found["insert_rate"]) == (2 / 4, 2 / 4, 2 / 4)


def test_the_longest_probe_is_found_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hashed(2, rows=4096)
    feed(model, list(range(0, 4000 * 7919, 7919)), list(range(50)))
    exact = {name: model.inner.index(name).longest_probe() for name in ("t0", "t1")}
    assert exact["t0"] > exact["t1"] > 0
    groups = model.inner.index("t0").slot_groups.size(0)
    read = []
    stock = index_health.home_groups
    monkeypatch.setattr(index_health, "home_groups", lambda ids, count: read.append(len(ids)) or stock(ids, count))
    watched = recfx.monitor(model, probed_groups=-(-groups // 4))
    seen = [watched.scalars() for _ in range(8)]
    assert [f"{T1}/longest_probe" in each for each in seen] == [False] * 4 + [True] * 4
    assert all(f"{T0}/longest_probe" in each for each in seen)
    assert seen[3][f"{T0}/longest_probe"] == seen[7][f"{T0}/longest_probe"] == exact["t0"]
    assert seen[7][f"{T1}/longest_probe"] == exact["t1"]
    assert sum(read) == 4000 + 50  # each id once
    model.inner.index("t0").reset()
    after = [watched.scalars().get(f"{T0}/longest_probe") for _ in range(4)]
    assert after == [exact["t0"]] * 3 + [None]  # until every window was read again


def test_all_probes_at_once_or_none() -> None:
    model = hashed(2)
    feed(model, [1, 2, 3], [4])
    assert not [tag for tag in recfx.monitor(model, probed_groups=0).scalars() if tag.endswith("probe")]
    found = recfx.monitor(model, probed_groups=0).scalars(probe_all=True)
    assert found[f"{T0}/longest_probe"] == model.inner.index("t0").longest_probe()
    assert found[f"{T1}/longest_probe"] == 1.0


def test_counts_that_begin_anew_are_no_interval() -> None:
    model = hashed(buckets=1)
    watched = recfx.monitor(model)
    feed(model, [1, 2, 3])
    watched.scalars()
    model.inner.index("t0").reset()
    feed(model, [1])
    assert of(T0, watched.scalars()) == {"occupancy": 0.01, "worst_bucket": 0.01}
    feed(model, [1, 2])
    assert of(T0, watched.scalars())["insert_rate"] == 1 / 2


def test_what_a_writer_gets() -> None:
    class Writer:
        def __init__(self) -> None:
            self.found: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.found.append((tag, scalar_value, global_step))

    model, writer = hashed(2), Writer()
    watched, same = recfx.monitor(model), recfx.monitor(model)
    feed(model, [1, 2, 3], [4, 4])
    watched.log(writer, 17)
    assert writer.found == [(tag, value, 17) for tag, value in same.scalars().items()]
    assert {type(value) for _, value, _ in writer.found} == {float}
    watched.log(None, 18)


def test_names_are_those_of_the_model_whatever_is_around_it() -> None:
    model, _ = dlrm()
    converted = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0))
    names = tuple(f"sparse_arch.embedding_bag_collection.embedding_bags.t{number}" for number in range(2))
    assert recfx.monitor(converted).tables == recfx.monitor(torch.compile(converted)).tables == names
    root = recfx.convert(collection(), hashing=recfx.HashConfig(dense_rows=0))
    assert recfx.monitor(root).tables == ("embedding_bags.t0", "embedding_bags.t1")
    both = nn.ModuleDict({"module": root, "_orig_mod": copy.deepcopy(root)})
    assert len(recfx.monitor(both).tables) == 4


def test_nothing_of_the_model_changes_and_nothing_is_hooked() -> None:
    model = hashed(2, buckets=1)
    feed(model, [1, 2], [3])
    state = copy.deepcopy(model.state_dict())
    attributes = [sorted(module.__dict__) for module in model.modules()]
    recfx.monitor(model).scalars(probe_all=True)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert [sorted(module.__dict__) for module in model.modules()] == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_tables_without_an_index_have_no_scalars() -> None:
    assert recfx.monitor(recfx.convert(collection())).scalars() == {}
    on_meta = recfx.HashEmbeddingBagCollection(tables=[config(0)], device=torch.device("meta"))
    assert recfx.monitor(on_meta).scalars() == {}


@pytest.mark.parametrize(
    ("model", "more", "reason"),
    [
        (Towers(), {}, "no_collection"),
        (nn.Linear(1, 1), {}, "no_collection"),
        ("model", {}, "invalid_argument"),
        (recfx.convert(collection(1)), {"probed_groups": -1}, "invalid_argument"),
        (recfx.convert(collection(1)), {"probed_groups": True}, "invalid_argument"),
    ],
)
def test_refusals(model: Any, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(recfx.ConversionError) as raised:
        recfx.monitor(model, **more)
    assert raised.value.reason == reason
