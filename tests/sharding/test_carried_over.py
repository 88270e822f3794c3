"""What a model has trained is carried over to other plans and other numbers of ranks, by every way, to the bit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingEnv, ShardMetadata
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from recfx.collections.sharding.shard import shard_collection
from tests.sharding.cases import Case, batches, deduped, plan_of, shard_converted, values_of
from tests.sharding.ranks import ranks
from tests.sharding.stateful import (
    ADMIT,
    LRU,
    assert_equal,
    assert_same,
    carry_over,
    case_of,
    counted,
    in_kinds,
    load_dcp,
    make,
    model_state,
    optimizer_state,
    save_dcp,
    tables_of,
    train,
    whole_state,
)
from tests.support.pairwise import pairwise

STEPS = 3
FILES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "checkpoint": (recfx.save_checkpoint, recfx.load_checkpoint),
    "dcp": (save_dcp, load_dcp),
}
RAW = recfx.HashConfig(dense_rows=0, rows=512, buckets=4)
Place = tuple[str, int]
"""A plan of ``stateful.PLANS`` and a number of ranks; 0: unsharded."""


@dataclass(frozen=True)
class Journey:
    """``way``: one of ``FILES``; or from an unsharded model as "whole tensors", or by "sharding" what was trained."""

    way: str
    source: Place
    target: Place
    hashing: recfx.HashConfig | None = LRU
    optimizer: str = "adagrad"
    kind: str = "pooled"

    def case(self, place: Place) -> Case:
        """What the model is at one end."""
        plan, world_size = place
        case = case_of(plan, self.hashing, self.optimizer, world_size)
        return deduped(case) if self.kind == "sent once" else in_kinds(case)[self.kind]

    def state_of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """What is compared. Collective."""
        return tables_of(model) if self.way == "checkpoint" else whole_state(model)


States = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""At the moment of the change, and two steps later."""


def leave(rank: int, world_size: int, journey: Journey, folder: str) -> States:
    case = journey.case(journey.source)
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, STEPS)
    with torch.no_grad():
        model.get_parameter("over.weight").add_(rank)  # rank 0's is saved
    saved = journey.state_of(model)
    if journey.way in FILES:
        FILES[journey.way][0](model, folder)
    train(model, case, rank, world_size, STEPS, STEPS + 2)
    return saved, journey.state_of(model)


def arrive(rank: int, world_size: int, journey: Journey, folder: str, saved: dict[str, torch.Tensor]) -> States:
    case = journey.case(journey.target)
    model: Any = make(case, 0 if journey.way == "sharding" else world_size, seed=5)
    if journey.way in FILES:
        train(model, case, rank, world_size, 0, 1)  # not a fresh one
        FILES[journey.way][1](model, folder)
    else:
        model.sparse.load_state_dict(model_state(saved), strict=True)
        model.sparse.fused_optimizer.load_state_dict(optimizer_state(saved))
    unsharded = model.sparse
    if journey.way == "sharding":
        weight = unsharded.weight("b")
        weight.data = weight.data.t().contiguous().t()  # stored column by column
        model.sparse = shard_converted(case, unsharded, world_size)
        assert all(parameter.is_contiguous() for parameter in model.sparse.parameters())
    arrived = journey.state_of(model)
    train(model, case, rank, world_size, STEPS, STEPS + 2)
    onward = journey.state_of(model)
    if journey.way == "sharding":  # which left the module itself as it was
        model.sparse = unsharded
        assert_same(whole_state(model), saved)
    return arrived, onward


def judge(journey: Journey, folder: str) -> None:
    def at(place: Place, function: Callable[..., States], *arguments: Any) -> list[States]:
        world_size = place[1]
        return ranks(world_size).run(function, *arguments) if world_size else [function(0, 0, *arguments)]

    saved, expected = at(journey.source, leave, journey, folder)[0]
    for arrived, onward in at(journey.target, arrive, journey, folder, saved):
        assert_equal(arrived, saved)
        assert onward.keys() == expected.keys() | {"over"} & onward.keys()
        for name, value in expected.items():  # gradients of a row are summed in another order
            if value.is_floating_point() and name != "over":
                torch.testing.assert_close(onward[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
            elif not name.endswith("counts"):
                assert name == "over" or torch.equal(onward[name], value), name


@pairwise(
    way=FILES,
    places=[
        (("tables", 0), ("columns", 2)), (("mixed", 2), ("rows", 1)), (("mixed", 2), ("replicas", 2)),
        (("mixed", 2), ("mixed", 4)), (("rows", 4), ("rows", 2)), (("mixed", 4), ("tables", 0)),
    ],
    setting=[(LRU, "adagrad"), (ADMIT, "adam"), (None, "adagrad")],
    kind=["pooled", "sequence", "mixed"],
)  # fmt: skip
def test_any_number_of_ranks_goes_on_from_what_any_number_saved(
    way: str, places: tuple[Place, Place], setting: tuple[recfx.HashConfig | None, str], kind: str, tmp_path: Path
) -> None:
    judge(Journey(way, *places, *setting, kind), str(tmp_path))


@pairwise(
    way=["whole tensors", "sharding"],
    target=[("columns", 2), ("mixed", 2), ("rows", 2), ("replicas", 2)],
    setting=[(LRU, "adam"), (ADMIT, "adagrad"), (None, "adagrad")],
    kind=["pooled", "sequence"],
)
def test_an_unsharded_model_goes_on_sharded(
    way: str, target: Place, setting: tuple[recfx.HashConfig | None, str], kind: str, tmp_path: Path
) -> None:
    judge(Journey(way, ("tables", 0), target, *setting, kind), str(tmp_path))


@pytest.mark.parametrize("source", [("tables", 0), ("rows", 2)])
def test_row_sums_go_to_other_ranks(source: Place, tmp_path: Path) -> None:
    judge(Journey("checkpoint", source, ("rows", 4), None, "rowwise_adagrad"), str(tmp_path))


@pytest.mark.parametrize(
    "rule", ["rowwise_adagrad_decoupled", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb", "lars_sgd"]
)
def test_rules_that_torchrec_cannot_run_on_the_cpu_go_on_sharded(rule: str, tmp_path: Path) -> None:
    judge(Journey("sharding", ("tables", 0), ("rows", 2), LRU, rule), str(tmp_path))


# On the same ranks, where steps are the same to the bit


def train_on_nothing(model: nn.Module, case: Case) -> None:
    """A batch that no row and no candidate knows of: only ``counts`` says that it was."""
    keys = batches(case, 1, 1)[0][0].keys()
    nothing = torch.zeros(len(keys), dtype=torch.int64)
    values_of(model.get_submodule("sparse")(KeyedJaggedTensor(keys, nothing[:0], lengths=nothing))).sum().backward()


def crossed(case: Case, world_size: int, seed: int) -> Any:
    """Each rank has two slices of the rows of table ``d``: one of its left columns, another of its right columns."""
    model: Any = make(case, 0, seed)
    plan, rows = plan_of(case, model.sparse, world_size), model.sparse.weight("d").shape[0] // 2
    shards = [
        ShardMetadata([piece * rows, block * 128], [rows, 128], f"rank:{(piece + block) % 2}/cpu")
        for block in range(2)
        for piece in range(2)
    ]
    plan["d"] = ParameterSharding("row_wise", "fused", [0, 1, 1, 0], EnumerableShardingSpec(shards))
    model.sparse = shard_collection(model.sparse, plan, ShardingEnv.from_process_group(dist.group.WORLD))
    return model


def forecasts(model: nn.Module) -> list[Any]:
    """What is derived from the counts of this rank's slices; where slots are says nothing about them."""
    (report,) = recfx.explain(model).collections
    hashings = [table.hashing and replace(table.hashing, longest_probe=None) for table in report.tables]
    return [*hashings, *(table.reasons for table in report.tables)]


def go_on(rank: int, world_size: int, case: Case, how: str, folder: str, is_crossed: bool) -> list[list[int]]:
    """Train without a stop, and carried over to a model that had trained something else; return the counts as well."""
    model, again = (crossed(case, world_size, seed) if is_crossed else make(case, world_size, seed) for seed in (0, 9))
    train(model, case, rank, world_size, 0, STEPS)
    train_on_nothing(model, case)
    train(again, case, rank, world_size, STEPS, STEPS + 4)
    monitors = [] if case.hashing is None else [recfx.monitor(watched) for watched in (model, again)]
    carry_over(model, again, how, folder)
    counts = counted(model)
    assert counted(again) == counts
    assert forecasts(again) == forecasts(model)
    for monitor in monitors[:1]:
        monitor.scalars()
    for trained in (model, again):
        train(trained, case, rank, world_size, STEPS, 2 * STEPS)
    assert counted(again) == counted(model)
    left, expected = tables_of(again), tables_of(model)
    if how != "checkpoint":  # TorchRec's names of an optimizer's state have no step for Adagrad
        expected = {name: value for name, value in expected.items() if not name.endswith((".step", "over"))}
    assert_equal({name: left[name] for name in expected}, expected)
    told = [{name: value for name, value in m.scalars().items() if "longest_probe" not in name} for m in monitors]
    assert told[:1] == told[1:]
    return list(counts.values())


HOW = ("state_dict", "checkpoint", "dcp", "dcp in place")


@pairwise(
    how=HOW,
    plan=["rows", "mixed"],
    kind=["pooled", "sequence", "sent once"],
    setting=[(ADMIT, "adam"), (LRU, "adagrad")],
)
def test_training_goes_on_as_if_it_had_not_stopped(
    how: str, plan: str, kind: str, setting: tuple[recfx.HashConfig, str], tmp_path: Path
) -> None:
    hashing, optimizer = setting if kind != "sent once" else (RAW, setting[1])
    case = Journey(how, (plan, 2), (plan, 2), hashing, optimizer, kind).case((plan, 2))
    for counts in ranks(2).run(go_on, case, how, str(tmp_path / "saved"), False):
        assert {of_table[0] for of_table in counts} == {STEPS + 1}


@pytest.mark.parametrize(("how", "kind"), [("checkpoint", "pooled"), ("checkpoint", "sequence"), ("dcp", "pooled")])
def test_rowwise_adagrad_keeps_a_state_a_column_block(how: str, kind: str, tmp_path: Path) -> None:
    case = in_kinds(case_of("columns", LRU, "rowwise_adagrad"))[kind]
    ranks(2).run(go_on, case, how, str(tmp_path / "saved"), False)


@pytest.mark.parametrize(("how", "hashing"), [("state_dict", LRU), ("checkpoint", ADMIT), ("dcp in place", ADMIT)])
def test_two_slices_of_a_table_on_a_rank(how: str, hashing: recfx.HashConfig, tmp_path: Path) -> None:
    case = case_of("rows", replace(hashing, rows=80, dense_rows=0))
    for counts in ranks(2).run(go_on, case, how, str(tmp_path / "saved"), True):
        assert counts[-2] != counts[-1]
