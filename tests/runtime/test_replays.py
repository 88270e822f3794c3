"""Forwards that activation checkpointing runs again: each gets the answers of its own first run."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection

import recfx
from recfx.errors import InputError
from recfx.runtime.hash_ids import HashIds
from recfx.runtime.replays import Replays
from recfx.versions.differences import top_saved_tensors_hooks
from tests.builders.batches import one_bag
from tests.builders.collections import one_table, table
from tests.builders.optimizers import attach
from tests.support.needs import needs
from tests.support.refusals import refused

Function = Callable[[torch.Tensor], torch.Tensor]
Run = Callable[[Function, torch.Tensor], torch.Tensor]


def table_of(rows: int = 10, optimizer: str = "sgd", lr: float = 0.1, **config: Any) -> Any:
    torch.manual_seed(0)
    plain = one_table(rows=rows)
    attach(plain, optimizer, lr=lr)
    options = {"dense_rows": 0, "admit_after": 2, **config}
    return recfx.convert(nn.ModuleDict({"ebc": plain}), hashing=recfx.HashConfig(**options))["ebc"]


def replays(model: nn.Module) -> Replays:
    (node,) = [module for module in model.modules() if isinstance(module, HashIds)]
    return node.indexes._replays


def without(function: Function, scale: torch.Tensor) -> torch.Tensor:
    return function(scale)


def nonreentrant(function: Function, scale: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = checkpoint(function, scale, use_reentrant=False)
    return output


def reentrant(function: Function, scale: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = checkpoint(function, scale, use_reentrant=True)
    return output


def nested(function: Function, scale: torch.Tensor) -> torch.Tensor:
    return nonreentrant(lambda scale: nonreentrant(function, scale).sin(), scale)


def nested_reentrant(function: Function, scale: torch.Tensor) -> torch.Tensor:
    return reentrant(lambda scale: reentrant(function, scale).sin(), scale)


def nonreentrant_in_reentrant(function: Function, scale: torch.Tensor) -> torch.Tensor:
    return reentrant(lambda scale: nonreentrant(function, scale).sin(), scale)


def below_other_hooks(function: Function, scale: torch.Tensor) -> torch.Tensor:
    def inside(scale: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            between = function(scale)
        return between.sin()

    return nonreentrant(inside, scale)


def composable(function: Function, scale: torch.Tensor) -> torch.Tensor:
    class Block(nn.Module):
        def forward(self, scale: torch.Tensor) -> torch.Tensor:
            return function(scale)

    output: torch.Tensor = composable_checkpoint(Block())(scale)
    return output


WAYS: list[Any] = [
    nonreentrant, reentrant, nested, nested_reentrant, nonreentrant_in_reentrant, below_other_hooks,
    pytest.param(composable, marks=needs(top_saved_tensors_hooks, "torch 2.9, which tells its hooks")),
]  # fmt: skip


def plainly(run: Run) -> Run:
    """What ``run`` computes, without any checkpoint."""
    return without if run in (nonreentrant, reentrant, composable) else lambda function, scale: function(scale).sin()


def forward(
    model: nn.Module, run: Run, ids: list[int], scale: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """A loss that is not linear, so that its gradients need what the replay reads."""
    return run(lambda scale: (model(one_bag(*ids, weights=weights)).values() * scale).exp(), scale).sum()


def assert_same(model: Any, plain: Any) -> None:
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert model.index("t").counters == plain.index("t").counters


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("unseen", ["zeros", "share"])
@pytest.mark.parametrize("run", WAYS)
def test_a_candidate_whose_place_goes_to_a_new_id_of_its_batch_is_still_admitted(
    run: Run, unseen: str, optimizer: str
) -> None:
    scales, models = [], []
    for way in (run, plainly(run)):
        model = table_of(2, optimizer, on_full="share", unseen=unseen)
        scale = torch.ones(1, requires_grad=True)
        for ids in ([1, 1, 2, 2], [3], [4], [3, 5, 6], [3, 7, 8, 8, 9]):
            forward(model, way, ids, scale).backward()
        scales.append(scale.grad)
        models.append(model)
    assert torch.equal(scales[0], scales[1])
    assert_same(*models)


def both_at_once(first: torch.Tensor, second: torch.Tensor) -> None:
    (first + second).backward()


def first_comes_first(first: torch.Tensor, second: torch.Tensor) -> None:
    first.backward()
    second.backward()


def second_comes_first(first: torch.Tensor, second: torch.Tensor) -> None:
    second.backward()
    first.backward()


@pytest.mark.parametrize("backwards", [both_at_once, first_comes_first, second_comes_first])
@pytest.mark.parametrize("ids", [([5, 9, 9], [5, 8, 8]), ([5], [5])], ids=["other_ids", "same_ids"])
@pytest.mark.parametrize("on_full", ["error", "evict"])
@pytest.mark.parametrize("run", WAYS)
def test_an_id_that_is_admitted_before_the_replay_is_answered_as_the_first_time(
    run: Run, on_full: str, ids: tuple[list[int], list[int]], backwards: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    scales, models = [], []
    for way in (run, plainly(run)):
        model = table_of(on_full=on_full, optimizer="adagrad", unseen="share")
        assert int(model.index("t").shared_rows(torch.tensor([5]))) > 2, "no batch trains what another one reads"
        scale = torch.ones(1, requires_grad=True)
        losses = [forward(model, way, batch_ids, scale) for batch_ids in ids]
        backwards(*losses)
        assert 5 in model.index("t").items()[0].tolist()
        scales.append(scale.grad)
        models.append(model)
    assert torch.equal(scales[0], scales[1])
    assert_same(*models)


@pytest.mark.parametrize("run", WAYS[:-1])
def test_a_second_backward_gets_the_same_answers_again(run: Run) -> None:
    """A rate of 0, as the second replay would read trained weights. Composable checkpoints have no second backward."""
    scales = []
    for way in (run, plainly(run)):
        model, scale = table_of(unseen="share", lr=0.0), torch.ones(1, requires_grad=True)
        losses = [forward(model, way, [5, 9, 9], scale) for _ in range(2)]
        for loss, keep in ((losses[0], True), (losses[1], True), (losses[1], False), (losses[0], False)):
            loss.backward(retain_graph=keep)
        scales.append(scale.grad)
    assert torch.equal(scales[0], scales[1])


@pytest.mark.parametrize("run", [nonreentrant, reentrant])
def test_two_calls_in_one_checkpoint_each_get_their_own_answers(run: Run) -> None:
    models = []
    for way in (run, without):
        model = table_of()

        def twice(scale: torch.Tensor, model: Any = model) -> torch.Tensor:
            first = model(one_bag(5, 9, 9)).values()
            return ((first + 2 * model(one_bag(5, 9, 9)).values()) * scale).exp()

        way(twice, torch.ones(1, requires_grad=True)).sum().backward()
        models.append(model)
    assert_same(*models)


def test_weights_of_a_batch_get_the_gradients_of_its_first_answers() -> None:
    gradients = []
    for run in (nonreentrant, without):
        torch.manual_seed(0)
        plain = EmbeddingBagCollection([table("t", ["f"], dim=4, rows=10)], is_weighted=True)
        attach(plain, "sgd")
        model = recfx.convert(plain, hashing=recfx.HashConfig(dense_rows=0, admit_after=2))
        weights = torch.tensor([2.0, 3.0, 4.0], requires_grad=True)
        scale = torch.ones(1, requires_grad=True)
        loss = forward(model, run, [5, 9, 9], scale, weights * 1)
        forward(model, run, [5], scale, torch.ones(1))
        loss.backward()
        gradients.append(weights.grad)
    assert torch.equal(gradients[0], gradients[1])


# How long answers are kept


def test_forwards_outside_of_checkpoints_leave_nothing() -> None:
    model, scale = table_of(), torch.ones(1, requires_grad=True)
    loss = forward(model, without, [5, 9], scale)
    with torch.no_grad():
        forward(model, without, [5, 9], scale)
    with torch.autograd.graph.save_on_cpu():
        unrelated = forward(model, without, [5, 9], scale)
    assert len(replays(model)) == 0
    loss.backward()
    unrelated.backward()


@pytest.mark.parametrize("run", [nonreentrant, below_other_hooks, nested])
def test_answers_go_with_the_backward_even_while_the_loss_is_kept(run: Run) -> None:
    model, scale = table_of(), torch.ones(1, requires_grad=True)
    losses = [forward(model, run, [5, 9], scale) for _ in range(3)]
    assert len(replays(model)) == 3
    losses[1].backward(retain_graph=True)
    assert len(replays(model)) == 3
    losses[1].backward()
    gc.collect()
    assert len(replays(model)) == 2


@pytest.mark.parametrize("run", WAYS)
def test_answers_go_with_a_graph_that_is_dropped(run: Run) -> None:
    model, scale = table_of(), torch.ones(1, requires_grad=True)
    losses = [forward(model, run, [5, 9], scale) for _ in range(3)]
    assert len(replays(model)) == 3
    del losses[0]
    losses.pop().backward()
    losses.clear()
    gc.collect()
    assert len(replays(model)) == 0


@pytest.mark.parametrize("run", [nonreentrant, reentrant])
def test_copies_know_nothing_of_the_original_s_graphs(run: Run) -> None:
    model, scale = table_of(), torch.ones(1, requires_grad=True)
    loss = forward(model, run, [5, 9], scale)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(replays(twin)) == 0
        forward(twin, run, [5, 9], scale).backward()
    loss.backward()


# What is refused


def test_a_forward_in_a_backward_that_did_not_run_before_is_refused() -> None:
    model = table_of()
    model(one_bag(5, 5, 6))
    started = torch.zeros(1, requires_grad=True) * 2
    started.register_hook(lambda gradient: model(one_bag(5)).values().sum().detach() * gradient)
    before = model.index("t").counters
    with refused("replayed_rows_unknown", error=InputError) as caught:
        started.sum().backward()
    assert caught.value.what_to_do
    assert model.index("t").counters == before


def test_a_checkpoint_that_is_not_torch_s_gets_answers_if_there_is_but_one() -> None:
    """It may run its function again in the backward of any function of its own."""
    model, scale = table_of(), torch.ones(1, requires_grad=True)

    def own_replay(ids: list[int]) -> torch.Tensor:
        started = scale * 2
        started.register_hook(lambda gradient: forward(model, without, ids, scale).detach() * gradient)
        return started.sum()

    first = forward(model, nonreentrant, [5, 9, 9], scale)
    own_replay([5, 9, 9]).backward()
    second = forward(model, nonreentrant, [5, 9, 9], scale)  # now 5 is admitted
    with refused("replayed_rows_unknown", error=InputError):
        own_replay([5, 9, 9]).backward()
    (first + second).backward()


@pytest.mark.parametrize(("on_full", "run"), [("error", reentrant), ("share", reentrant)])
def test_an_id_that_was_erased_before_its_replay_is_refused(on_full: str, run: Run) -> None:
    model, scale = table_of(on_full=on_full), torch.ones(1, requires_grad=True)
    loss = forward(model, run, [5, 5, 6], scale)
    model.index("t").erase(torch.tensor([5]))
    with refused("replayed_ids_absent", error=InputError):
        loss.backward()


def test_an_id_that_came_back_in_another_row_has_lost_its_own() -> None:
    model = table_of(3, on_full="evict", admit_after=1)
    model(one_bag(1, 2, 3)).values().sum().backward()
    scale = torch.ones(1, requires_grad=True)
    loss = forward(model, reentrant, [1], scale)
    row = int(model.index("t").find(torch.tensor([1])))
    for ids in ([2, 3], [4], [3, 4], [1]):
        model(one_bag(*ids)).values().sum().backward()
    assert int(model.index("t").find(torch.tensor([1]))) != row
    with refused("replayed_ids_evicted", error=InputError):
        loss.backward()


@pytest.mark.parametrize("run", [nonreentrant, reentrant])
def test_a_shared_row_that_got_the_weights_of_a_later_id_is_not_read_again(run: Run) -> None:
    model, scale = table_of(unseen="share"), torch.ones(1, requires_grad=True)
    (shared,) = model.index("t").shared_rows(torch.tensor([5])).tolist()
    assert shared > 0
    loss = forward(model, run, [5], scale)
    still_free = forward(model, run, [5], torch.ones(1, requires_grad=True))
    still_free.backward()  # which admitted 5, to another row
    for id_ in range(100, 100 + shared):
        forward(model, without, [id_, id_], scale)
    before = model.weight("t").detach().clone()
    with refused("replayed_rows_renewed", error=InputError):
        loss.backward()
    assert torch.equal(model.weight("t"), before)
