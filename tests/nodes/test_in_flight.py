"""Batches in flight: how long each protects its rows."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from recfx.errors import InputError
from recfx.kernels.hash_index import InFlight
from recfx.nodes.in_flight import BatchesInFlight, BatchInFlight


def batch(number: int = 1, evictions: Callable[[], int] = lambda: 0) -> BatchInFlight:
    return BatchInFlight({"t": number, "u": number}, evictions)


def output() -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.ones(3, requires_grad=True)
    return weight, weight * 2


def test_a_batch_is_over_when_all_its_lookups_have_run_their_backward() -> None:
    one = batch()
    one.rows = {"t": torch.tensor([0])}
    (_, first), (_, second), (_, third) = output(), output(), output()
    one.watch(first)
    one.watch(second)
    one.watch(third)
    one.watch(torch.ones(3))  # nothing to wait for
    third.sum().backward()
    second.sum().backward(retain_graph=True)
    assert not one.is_over
    second.sum().backward()  # the same one again
    assert not one.is_over
    assert one.rows is not None
    first.sum().backward()
    assert one.is_over
    assert one.rows is None


def test_a_second_backward_is_refused_once_ids_were_evicted() -> None:
    evicted = [3]
    one = batch(evictions=lambda: evicted[0])
    weight, values = output()
    one.watch(values)
    loss = values.sum()
    evicted[0] = 4  # what goes before the first backward took no row of this batch
    for _ in range(2):
        loss.backward(retain_graph=True)
    evicted[0] = 5
    with pytest.raises(InputError, match=r"tables \['t', 'u'\]") as caught:
        loss.backward()
    assert caught.value.reason == "backward_after_eviction"
    assert caught.value.what_to_do
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 4.0, 4.0]


def test_rows_that_must_keep_their_ids() -> None:
    batches = BatchesInFlight()
    nothing, empty = InFlight.nothing(), batches.of_table("t")
    assert (empty.oldest, empty.oldest_listed) == (nothing.oldest, nothing.oldest_listed)
    assert empty.rows.tolist() == []
    batches.add(None)
    held = [batch(5), batch(4), batch(9), batch(7), BatchInFlight({"u": 1}, lambda: 0), batch(1), batch(2)]
    for each in held:
        batches.add(each)
    held[2].rows = {"t": torch.tensor([8, 6]), "u": torch.tensor([1])}
    held[3].rows = {"t": torch.tensor([3]), "u": torch.tensor([2])}
    held[5].end()
    held[6].rows = {"t": torch.tensor([7]), "u": torch.tensor([7])}
    held[6].end()
    found = batches.of_table("t")
    assert (found.oldest, found.oldest_listed) == (4, 7)
    assert sorted(found.rows.tolist()) == [3, 6, 8]
    assert batches.of_table("u").oldest == 1
    assert batches.of_table("v").rows.tolist() == []
    del held, each
    gc.collect()
    assert batches.of_table("t").oldest == nothing.oldest, "nobody can run their backwards any more"
