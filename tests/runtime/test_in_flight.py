"""Batches in flight: how long each keeps its rows."""

from __future__ import annotations

import torch

from recfx.errors import InputError
from recfx.hashing import HashConfig, HashIndex
from recfx.ir.tables import TableSpec
from recfx.kernels.index.index_buffers import BATCHES, EVICTED
from recfx.runtime.in_flight import BatchInFlight
from tests.support.refusals import refused

INDEXES = {name: HashIndex(8, config=HashConfig(on_full="evict"), name=name) for name in "tu"}


def batch(number: int = 1, kept_until: int = 2, tables: str = "tu") -> BatchInFlight:
    """A batch that its indexes count as this one."""
    for name in tables:
        INDEXES[name].counts[BATCHES] = number
    return BatchInFlight("ebc", kept_until, [(spec(name), INDEXES[name]) for name in tables])


def spec(name: str) -> TableSpec:
    return TableSpec(name, (name,), (name,), 8, 4, "SUM", INDEXES[name].config, 0.0, 0.0)


def output() -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.ones(3, requires_grad=True)
    return weight, weight * 2


def test_a_batch_is_over_when_all_its_lookups_have_run_their_backward() -> None:
    one = batch()
    one.keep({"t": torch.tensor([0])}, training=True)
    (_, first), (_, second), (_, third) = output(), output(), output()
    one.watch([first])
    one.watch([second])
    one.watch([third])
    one.watch([torch.ones(3)])  # nothing to wait for
    third.sum().backward()
    second.sum().backward(retain_graph=True)
    assert one.kept
    second.sum().backward()  # the same one again
    assert one.kept
    assert "t" in one.kept
    first.sum().backward()
    assert not one.kept


def test_a_second_backward_is_refused_once_ids_were_evicted() -> None:
    one = batch()
    one.keep({"t": torch.tensor([0])}, training=True)
    weight, values = output()
    one.watch([values])
    loss = values.sum()
    INDEXES["t"].counts[EVICTED] += 1  # what goes before the first backward took no row of this batch
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert one.lost() == []
    INDEXES["t"].counts[EVICTED] += 1
    assert one.lost() == ["t"]
    with refused("backward_after_eviction", match=r"tables \['t'\]", error=InputError) as caught:
        loss.backward()
    assert caught.value.module_path == "ebc"
    assert caught.value.what_to_do
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 4.0, 4.0]
