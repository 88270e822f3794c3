"""What the nodes of a collection share: on which device it is, who owns a weight, and one lock per process."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from torch import nn

from recfx.hashing import HashIndex
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules.sgd import SGD
from recfx.runtime.table_store import TableStore
from tests.support.refusals import refused


def store(device: str | None = None, tables: tuple[str, ...] = ("t", "u")) -> TableStore:
    bags = nn.ModuleDict({name: nn.EmbeddingBag(4, 2) for name in tables})
    indexes = nn.ModuleDict({"t": HashIndex(4)})
    optimizers = {name: FusedOptimizer(SGD, {"lr": 0.1}) for name in tables[:1]}
    return TableStore(bags, indexes, optimizers, {}, None if device is None else torch.device(device))


def test_the_device_is_that_of_the_tables_if_there_are_any() -> None:
    one = store("cpu")
    one.bags.to("meta")
    assert one.device.type == "meta"
    assert [store(device, ()).device.type for device in (None, "cpu", "meta")] == ["cpu", "cpu", "meta"]
    one.bags["t"]._parameters["weight"] = None
    assert one.device.type == "cpu"
    with refused("unsupported_bag", match="'t' has no parameter `weight`"):
        one.weight("t")


def test_who_owns_a_weight_is_known_once_it_was_recorded() -> None:
    one = store()
    parameter = nn.Parameter(torch.zeros(4, 2))
    assert one.owner("t") is None
    assert one.replaced(["t", "u"], [parameter, parameter]) == []
    one.own_weights()
    assert one.replaced(["u", "t"], [parameter, one.weight("t")]) == []
    assert one.replaced(["u", "t"], [parameter, parameter]) == ["t"], "u has no fused optimizer"
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert copied.owner("t") is None


def test_threads_of_a_process_share_a_lock_and_other_processes_and_copies_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = store()
    lock = one.new_rows_lock
    assert one.new_rows_lock is lock
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert copied.new_rows_lock is not lock
        assert copied.new_rows_lock is copied.new_rows_lock
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    theirs = one.new_rows_lock
    assert theirs is not lock
    assert one.new_rows_lock is theirs


def test_a_table_without_an_index_is_told_from_one_that_is_unknown() -> None:
    one = store()
    assert isinstance(one.index("t"), HashIndex)
    with pytest.raises(KeyError, match="'u' has no index: its ids are rows"):
        one.index("u")
    with pytest.raises(KeyError, match="no table 'v' here, but t, u"):
        one.index("v")
