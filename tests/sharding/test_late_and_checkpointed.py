"""Backwards that come late, forwards that are computed again, and the steps of a batch."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import recfx
from recfx.errors import InputError, OutOfStepError
from recfx.runtime.marks import has_failed
from tests.sharding.cases import Case, Table, as_sequence, batches, build, shard, values_of
from tests.sharding.cases import sharded_model as sharded_parts
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.stateful import make, sharded_of
from tests.sharding.typical_cases import TYPES
from tests.support.pairwise import pairwise
from tests.support.refusals import refused


def train(
    rank: int, world_size: int, case: Case, use_reentrant: bool | None, is_alone: bool = False
) -> list[torch.Tensor]:
    """Two batches forwarded, then both backwarded; what that leaves on this rank. The optimizer is outside.

    With ``is_alone``, only the collection is checkpointed: torch stops its second forward as soon as it can.
    """
    standard, width = build(case)
    model: Any = shard(case, standard, world_size)
    scale = torch.ones(width, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    both = iter(batches(case, world_size, 6))
    for first, second in zip(both, both, strict=True):
        losses = []
        for batch in (first, second):

            def values(batch: Any = batch) -> torch.Tensor:
                return values_of(model(batch[rank]))

            def forward(scale: torch.Tensor, values: Any = values) -> torch.Tensor:
                return ((checkpoint(values, use_reentrant=False) if is_alone else values()) * scale).exp().sum()

            losses.append(
                forward(scale) if use_reentrant is None else checkpoint(forward, scale, use_reentrant=use_reentrant)
            )
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    left = [scale.detach()]
    for local in model.sharding.local():
        left += [model.store.weight(local.name).detach(), *model.hash_indexes[local.name].state_dict().values()]
    return [tensor.clone() for tensor in left]


@pytest.mark.parametrize(
    ("kind", "is_pooled"), [("table_wise", True), ("row_wise", False), ("row_wise", True), ("data_parallel", False)]
)
def test_checkpointed_batches_train_the_same_as_others(kind: str, is_pooled: bool) -> None:
    config = recfx.HashConfig(dense_rows=0, rows=32, buckets=2, on_full="share")
    tables = (Table("a", 11, 8, ("f0",), "SUM", TYPES[kind]), Table("b", 13, 8, ("f1", "f0"), "MEAN", TYPES[kind]))
    case = Case(tables, hashing=config, raw_ids=40, optimizer="sgd", kernel="dense", sizes=(3, 5))
    case = case if is_pooled else as_sequence(case)
    pair = ranks(2)
    expected = pair.run(train, case, None)
    for how in ((False,), (True,), (None, True)):
        for rank, tensors in enumerate(pair.run(train, case, *how)):
            assert len(tensors) == len(expected[rank])
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, expected[rank], strict=True))


def refusals(rank: int, world_size: int, case: Case, use_reentrant: bool) -> list[str]:
    """What the backwards of two checkpointed batches raise here, and of one without a checkpoint."""
    sparse, one = sharded_of(make(case, world_size)), torch.ones(1, requires_grad=True)

    def loss(one: torch.Tensor, features: Any) -> torch.Tensor:
        return (values_of(sparse(features)) * one).sum()

    reasons = []
    first, second, third = (step[rank] for step in batches(case, world_size, 3))
    for features in (first, second):
        with pytest.raises(InputError) as caught:
            checkpoint(loss, one, features, use_reentrant=use_reentrant).backward()
        reasons.append(caught.value.reason)
    loss(one, third).backward()  # ranks are still in step
    return reasons


@pairwise(
    config=[{"on_full": "evict"}, {"on_full": "share", "admit_after": 2}],
    use_reentrant=[False, True],
    is_pooled=[True, False],
)
def test_all_ranks_refuse_tables_that_evict_or_admit(
    config: dict[str, Any], use_reentrant: bool, is_pooled: bool
) -> None:
    table = Table("t", 24, 8, ("f0",), sharding=("table_wise", 0))  # rank 1 has no part of it
    case = Case((table,), hashing=recfx.HashConfig(dense_rows=0, **config), raw_ids=60, sizes=(2,))
    reasons = ranks(2).run(refusals, case if is_pooled else as_sequence(case), use_reentrant)
    assert reasons == [["activation_checkpointing"] * 2] * 2


ALONE = (  # rank 1 has no part of the table whose rows are given away
    Table("small", 24, 8, ("f0",), sharding=("table_wise", 0)),
    Table("large", 512, 8, ("f1",), sharding=("row_wise",)),
)
EVICTING = Case(ALONE, hashing=recfx.HashConfig(dense_rows=0, on_full="evict"), raw_ids=200, sizes=(2,))


def late(rank: int, world_size: int) -> tuple[str, str]:
    """What a backward raises after its rows have gone to other ids, and what the next call raises then."""
    sparse = sharded_of(make(EVICTING, world_size))
    sparse.batches_in_flight = 0
    first, *others = [step[rank] for step in batches(EVICTING, world_size, 12)]
    loss = sparse(first).values().sum()
    for features in others:
        sparse(features).values()
    raised = ["", ""]
    try:
        loss.backward()
    except InputError as error:
        raised[0] = error.reason
        with pytest.raises(OutOfStepError) as after:
            sparse(first)
        raised[1] = after.value.reason
    return raised[0], raised[1]


def test_a_rank_refuses_a_backward_if_it_has_lost_the_rows_and_sends_nothing_more() -> None:
    assert ranks(2).run(late) == [("backward_after_eviction", "out_of_step"), ("", "")]


@on_ranks(2)
def test_ranks_that_differ_in_batches_in_flight_are_told(rank: int, world_size: int) -> None:
    sparse = sharded_of(make(EVICTING, world_size))
    sparse.batches_in_flight = 2 + rank
    with refused("ranks_at_different_calls", error=OutOfStepError):
        sparse(batches(EVICTING, world_size, 1)[0][rank]).values()
    sparse.batches_in_flight = 3
    sparse(batches(EVICTING, world_size, 1)[0][rank]).values()


CASE = Case(
    (Table("rows", 24, 8, ("f0",), "SUM", ("row_wise",)), Table("one", 24, 8, ("f1",), "SUM", ("table_wise", 0)))
)


@on_ranks(2)
def test_after_a_step_that_failed_nothing_that_was_sent_before_is_run(rank: int, world_size: int) -> None:
    """Two batches are sent; the first one's lookup fails."""
    case = Case(CASE.tables[:1])
    module: Any = sharded_parts(case, world_size).sparse
    calls = []
    for step in batches(case, world_size, 2):
        context = module.create_context()
        calls.append((context, module.input_dist(context, step[rank]).wait().wait()))
        assert "features" not in context.values  # the batch itself is not kept

    def fail(*_: Any) -> None:
        raise ValueError("not this one")

    handles = [lookup.register_forward_pre_hook(fail) for lookup in module._lookups]
    with pytest.raises(ValueError, match="not this one"):
        module.compute(*calls[0])
    for handle in handles:
        handle.remove()
    assert has_failed(module.groups.pooled)
    third = module.create_context()
    for call in (
        lambda: module.compute(*calls[1]),
        lambda: module.input_dist(third, batches(case, world_size, 1)[0][rank]),
        module.in_step.refuse_if_failed,
    ):
        with refused("out_of_step", "sparse", error=OutOfStepError) as caught:
            call()
        assert caught.value.message.endswith("too (sparse: ValueError: not this one).")
