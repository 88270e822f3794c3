"""Ranks that do not make the same calls: all of them learn of it before ids are looked up, and go on in step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import sharding_plan as stock
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan

import recfx
from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from tests.sharding.cases import FORMS, Case, Table, build, plan_of, shard_converted, values_of
from tests.sharding.pipelined import CPU, PIPELINES, Two, batches_of_rank, dense_optimizer, sharded_model, what_is_left
from tests.sharding.pipelined import Batch as DenseBatch
from tests.sharding.ranks import on_ranks, ranks
from tests.support.refusals import refused

TYPES = {
    "table_wise": ("table_wise", 1),
    "row_wise": ("row_wise",),
    "data_parallel": ("data_parallel",),
    "column_wise": ("column_wise", 1, 0),
    "table_row_wise": ("table_row_wise", 0),
}

KINDS = ("table_wise", "row_wise", "data_parallel", "column_wise", "table_row_wise")


def collection(
    path: str, feature: str, sharding: tuple[Any, ...], world_size: int
) -> ShardedHashEmbeddingBagCollection:
    """Every row of its table holds its feature's number, times a hundred, plus the row's."""
    case = Case((Table(f"of_{feature}", 8, 4, (feature,), sharding=sharding),), kernel="dense", local_size=world_size)
    standard = build(case)[0]
    rows = 100 * int(feature[1:]) + torch.arange(8.0).unsqueeze(1).expand(8, 4)
    standard.embedding_bags[f"of_{feature}"].weight.data.copy_(rows)
    return shard_converted(case, recfx.convert(standard), world_size, path=path)


class Towers(nn.Module):
    """Two collections; ``order`` says which are called with a batch, in which order."""

    def __init__(self, sharding: tuple[Any, ...], world_size: int) -> None:
        super().__init__()
        self.user = collection("user", "f1", sharding, world_size)
        self.item = collection("item", "f2", sharding, world_size)

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        return [
            self.get_submodule(name)(features).values()
            for name, features in zip(batch.order, batch.features, strict=True)
        ]


@dataclass
class Batch:
    """``order``: of calls; ``rows``: that each of them asks for; ``wrong``: the call that does not fit."""

    order: tuple[str, ...]
    rows: int
    wrong: int = -1

    @property
    def features(self) -> list[KeyedJaggedTensor]:
        return [self._of(name, number == self.wrong) for number, name in enumerate(self.order)]

    def _of(self, name: str, wrong: bool) -> KeyedJaggedTensor:
        key = {"user": "f1", "item": "f2"}[name]
        return KeyedJaggedTensor(["other" if wrong else key], torch.tensor([self.rows]), lengths=torch.tensor([1]))

    @property
    def expected(self) -> list[float]:
        return [100.0 * {"user": 1, "item": 2}[name] + self.rows for name in self.order]


def answers(model: nn.Module, batches: list[Batch], training: bool) -> list[Any]:
    """What each batch gives: pooled numbers, or the reason of an error."""
    model.train(training)
    told: list[Any] = []
    for batch in batches:
        try:
            pooled = model(batch)
            if training:
                sum(part.sum() for part in pooled).backward()
                model.zero_grad()
            told.append([float(part[0, 0]) for part in pooled])
        except recfx.RecfxError as error:
            told.append(error.reason)
    return told


def run(rank: int, world_size: int, batches: list[list[Batch]], sharding: str, training: bool) -> list[Any]:
    return answers(Towers(TYPES[sharding], world_size), batches[rank % len(batches)], training)


BOTH, TURNED, ITEM, TWICE = ("user", "item"), ("item", "user"), ("item",), ("user", "user")
HERE, THERE = "missing_feature", "refused_on_another_rank"


def steps(*orders: tuple[str, ...], wrong: dict[int, int] | None = None) -> list[Batch]:
    return [Batch(order, step % 8, (wrong or {}).get(step, -1)) for step, order in enumerate(orders)]


@pytest.mark.parametrize(
    ("order", "wrong_call", "sharding", "training"),
    [
        ((BOTH, TWICE)[number % 2], number // 2 % 2, sharding, number // 4 % 2 == 0)  # all eight ways, and each twice
        for number, sharding in enumerate([*KINDS, *KINDS])
    ],
)
def test_a_batch_that_one_rank_refuses_is_refused_by_all(
    order: tuple[str, ...], wrong_call: int, sharding: str, training: bool
) -> None:
    """Also where a collection was called alone before, and where calls come in another order."""
    orders = (ITEM, order, order, order, TURNED)
    good, bad = steps(*orders), steps(*orders, wrong={2: wrong_call})
    expected: list[Any] = [batch.expected for batch in good]
    told = ranks(2).run(run, [good, bad], sharding, training)
    assert told == [[*expected[:2], reason, *expected[3:]] for reason in (THERE, HERE)]


# Several models in one group


@on_ranks(2)
def test_two_models_with_equal_paths_are_told_apart(rank: int, world_size: int) -> None:
    models = [Towers(TYPES["row_wise"], world_size) for _ in range(2)]
    mixed_up, *right = (answers(models[number], steps(BOTH), training=True) for number in (rank, 0, 1))
    assert mixed_up == ["ranks_at_different_calls"]
    assert right == [[steps(BOTH)[0].expected]] * 2


# Ranks at different calls


def cut_elsewhere(plan: ShardingPlan) -> None:
    """After three of the eight rows, instead of four."""
    spec: Any = plan.plan["user"]["of_f1"].sharding_spec  # type: ignore[index]
    first, second = spec.shards
    first.shard_sizes, second.shard_offsets, second.shard_sizes = [3, 4], [3, 0], [5, 4]


def replicate(plan: ShardingPlan) -> None:
    on_all: Any = stock.data_parallel()(nn.Parameter(torch.zeros(8, 4)), 2, 2, "cpu", SHARDER)
    plan.plan["user"]["of_f1"] = on_all  # type: ignore[index]


def rename(plan: ShardingPlan) -> None:
    tables: Any = plan.plan["user"]
    tables["other"] = tables.pop("of_f1")


SHARDER: Any = EmbeddingBagCollectionSharder()
ON_RANK_1: dict[str, tuple[Callable[[ShardingPlan], object], list[str]]] = {
    "the same": (lambda plan: None, ["", ""]),
    "cuts": (cut_elsewhere, ["rank 0 has table 'of_f1' row_wise with kernel dense (rows (0, 4)"] * 2),
    "kinds": (replicate, ["rank 1 has table 'of_f1' data_parallel with kernel dense"] * 2),
    "tables": (rename, ["[ranks_have_different_plans] user: rank 1 cannot shard by its plan", "[plan_unknown_table]"]),
    "collections": (lambda plan: plan.plan.pop("item"), ["[ranks_have_different_plans] ", "item"]),
    "none": (lambda plan: plan.plan.clear(), ["rank 0 has a plan of ['item', 'user']; rank 1 has no plan."] * 2),
}


def each_its_plan(rank: int, world_size: int, entry: str, change: str) -> str:
    """What sharding is refused for if rank 1 has another plan."""
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan, model = ShardingPlan({}), nn.ModuleDict()
    for path, feature in (("user", "f1"), ("item", "f2")):
        case = Case((Table(f"of_{feature}", 8, 4, (feature,), sharding=("row_wise",)),), kernel="dense")
        model[path] = build(case)[0]
        plan.plan[path] = EmbeddingModuleShardingPlan(plan_of(case, recfx.convert(model[path]), world_size))
    if rank == 1:
        ON_RANK_1[change][0](plan)
    given = plan if plan.plan else None
    try:
        if entry == "convert":
            recfx.convert(model, plan=given, env=env)
        else:
            DistributedModelParallel(recfx.convert(model), env, CPU, given, recfx.sharders())
    except recfx.ConversionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "entry"),
    [(change, ("convert", "DistributedModelParallel")[number % 2]) for number, change in enumerate(ON_RANK_1)],
)
def test_ranks_that_shard_by_different_plans_are_refused(entry: str, change: str) -> None:
    """While the model is sharded, where they would otherwise wait for each other, or later look for other rows."""
    told = ranks(2).run(each_its_plan, entry, change)
    for said, expected in zip(told, ON_RANK_1[change][1], strict=True):
        assert expected in said
        assert bool(expected) == bool(said)


def leave_out(rank: int, world_size: int) -> list[Any]:
    """Rank 1 fails between its calls of the second step, and its caller goes on with the third."""
    model = Towers(TYPES["row_wise"], world_size)
    told: list[Any] = []
    for step, batch in enumerate(steps(*[BOTH] * (4 + rank))):
        try:
            user = model.user(batch.features[0]).values()
            if (rank, step) == (1, 1):
                raise KeyError("the caller's own")
            told.append([float(part[0, 0]) for part in (user, model.item(batch.features[1]).values())])
        except KeyError:
            told.append("own")
        except recfx.OutOfStepError as error:
            told.append(str(error))
    return told


def test_ranks_at_different_calls_all_say_so_and_the_next_step_is_right() -> None:
    first, second = ranks(2).run(leave_out)
    expected = [batch.expected for batch in steps(*[BOTH] * 5)]
    assert (first[0], second[0]) == (expected[0], expected[0])
    said = "[ranks_at_different_calls]"
    where = "rank 0 calls the collection of feature 'f2'; rank 1 calls the collection of feature 'f1'"
    assert said in first[1]
    assert where in first[1]
    assert second[1] == "own"
    assert where in second[2]
    assert first[2:] == expected[2:4]  # rank 1 is a batch ahead from here on
    assert second[3:] == expected[3:]


ALONE: dict[str, Callable[[nn.Module, Path], object]] = {
    "save_checkpoint": lambda model, folder: recfx.save_checkpoint(model, folder / "saved"),
    "load_checkpoint": lambda model, folder: recfx.load_checkpoint(model, folder / "saved"),
    "export": lambda model, folder: recfx.export(model, folder / "model.pt", (steps(BOTH)[0],)),
    "unconvert": lambda model, folder: recfx.unconvert(model, with_mapping=True),
}


@pytest.mark.parametrize("call", ALONE)
@on_ranks(2)
def test_what_all_ranks_have_to_call_is_refused_on_one_alone(
    rank: int, world_size: int, call: str, tmp_path: Path
) -> None:
    """``if rank == 0: recfx.save_checkpoint(...)``, as it is right for other libraries."""
    model = Towers(TYPES["row_wise"], world_size)
    told = f"rank 0 calls '{call}'; rank 1 calls the collection"
    with refused("ranks_at_different_calls", match=told, error=recfx.OutOfStepError):
        ALONE[call](model, tmp_path) if rank == 0 else model(steps(BOTH)[0])
    assert answers(model, steps(BOTH), training=True) == [steps(BOTH)[0].expected]
    assert list(tmp_path.iterdir()) == []


# Ranks in different modes


CHANGES: dict[str, tuple[int, Callable[[nn.Module], object], str]] = {
    "eval": (1, lambda model: model.eval(), "rank 0 calls {} in training mode; rank 1 calls {} in eval mode."),
    "no gradients": (
        1,
        lambda model: torch.set_grad_enabled(False),
        "rank 0 calls {} in training mode; rank 1 calls {} in training mode without gradients.",
    ),
    "evaluates alone": (
        0,
        lambda model: (model.eval(), torch.set_grad_enabled(False)),
        "rank 0 calls {} in eval mode without gradients; rank 1 calls {} in training mode.",
    ),
}


def in_other_modes(
    rank: int, world_size: int, case: Case, pipeline: str, change: str, odd: tuple[int, ...], leave_out: bool = False
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The errors of the odd steps, which one rank makes in another mode, and what is left; or without these steps."""
    model = sharded_model(case, world_size, "two")
    driver = PIPELINES[pipeline](model, dense_optimizer(case, model), CPU)
    source, errors = iter(batches_of_rank(case, rank, world_size, 6, "two")), []
    changed_on, apply, _ = CHANGES[change]
    for step in range(6):
        if step in odd and leave_out:
            next(source)
            continue
        if step in odd and rank == changed_on:
            apply(model)
        try:
            driver.progress(source)
        except recfx.OutOfStepError as error:
            errors.append(f"{error.reason} {error.message}")
            if pipeline == "sparse_dist":  # which does not go on after an error
                break
        finally:
            torch.set_grad_enabled(True)
            model.train()
    return errors, what_is_left(model)


@pytest.mark.parametrize(
    ("change", "sharding", "odd"),
    [
        ("eval", "data_parallel", (1,)),
        ("eval", "column_wise", (1, 2, 3, 4)),
        ("no gradients", "row_wise", (2,)),
        ("evaluates alone", "data_parallel", (2,)),
        ("evaluates alone", "table_row_wise", (1, 3)),
    ],
)
def test_ranks_in_different_modes_are_all_refused_and_nothing_changes(
    change: str, sharding: str, odd: tuple[int, ...]
) -> None:
    hashing = recfx.HashConfig.raw_ids(buckets=2, on_full="evict")
    table = Table("a", 60, 8, ("f0",), sharding=TYPES[sharding])
    case = Case((table,), hashing=hashing, raw_ids=40, kernel="fused", local_size=2)
    told = ranks(2).run(in_other_modes, case, "loop", change, odd)
    left_out = ranks(2).run(in_other_modes, case, "loop", change, odd, True)
    expected = CHANGES[change][2].format(*["the collection of feature 'f0'"] * 2)
    for (errors, left), (_, of_others) in zip(told, left_out, strict=True):
        assert [error.partition(" ")[0] for error in errors] == ["ranks_at_different_calls"] * len(odd)
        assert all(expected in error for error in errors)
        for name, value in of_others.items():
            assert torch.equal(left[name], value), name


def test_a_rank_that_changes_its_mode_while_a_batch_is_in_flight_ends_the_run_of_all() -> None:
    """Both collections' ids are sent together. No rank waits in the backward of the batch that was in flight."""
    case = Case((Table("a", 12, 8, ("f0",), sharding=("row_wise",)),))
    for errors, _ in ranks(2).run(in_other_modes, case, "recfx", "eval", (2,)):
        first, *others = (error.partition(" ") for error in errors)
        assert first[0] == "ranks_at_different_calls"
        assert "together in training mode ahead of its step; rank 1 calls" in first[2]
        assert [reason for reason, *_ in others] == ["ranks_at_different_calls", "out_of_step", "out_of_step"]


def test_a_mode_that_changes_while_torchrecs_pipeline_has_a_batch_in_flight() -> None:
    case = Case((Table("a", 12, 8, ("f0",), sharding=("row_wise",)),))
    for errors, _ in ranks(2).run(in_other_modes, case, "sparse_dist", "eval", (2,)):
        assert [error.partition(" ")[0] for error in errors] == ["ranks_at_different_calls"]


# Losses that leave a collection out on some ranks


def other_losses(
    rank: int, world_size: int, sharding: str, order: tuple[str, ...], losses: list[list[tuple[int, ...]]]
) -> list[str]:
    """What each step raises if a rank's loss in the second step sums these outputs, backward by backward."""
    model, told = Towers(TYPES[sharding], world_size), []
    for step in range(4):
        try:
            pooled = model(Batch(order, step))
            for used in losses[rank % len(losses)] if step == 1 else [range(len(order))]:
                torch.stack([pooled[number].sum() for number in used]).sum().backward(retain_graph=True)
            told.append("")
        except recfx.OutOfStepError as error:
            told.append(f"{error.reason} {error.message}")
        model.zero_grad()
    return told


@pytest.mark.parametrize(
    ("sharding", "order", "losses", "where"),
    [
        ("table_wise", BOTH, [[(0,)], [(1,)]], "feature 'f1': the loss of rank 1 leaves it out."),
        ("row_wise", BOTH, [[(1,)], [(0,)]], "feature 'f1': the loss of rank 0 leaves it out."),
        ("column_wise", TURNED, [[(0,)], [(1,)], [(1,)]], "feature 'f2': the loss of ranks 1, 2 leaves it out."),
        ("data_parallel", BOTH, [[(0,), (0,)], [(0,), (1,)]], "feature 'f1': losses use its outputs differently"),
        ("table_row_wise", TWICE, [[(0,)], [(1,)]], "feature 'f1': losses use its outputs differently"),
        ("row_wise", BOTH, [[(0,), (1,)], [(1,), (0,)]], "feature 'f1': losses use its outputs differently"),
    ],
)
def test_a_loss_without_a_collection_on_some_ranks_is_noticed_with_the_next_ids(
    sharding: str, order: tuple[str, ...], losses: list[list[tuple[int, ...]]], where: str
) -> None:
    """Gradients of equal sizes were exchanged for each other. All ranks say so once, and are in step again."""
    for told in ranks(len(losses)).run(other_losses, sharding, order, losses):
        assert [step.partition(" ")[0] for step in told] == ["", "", "backward_on_some_ranks", ""]
        assert where in told[2]


@pytest.mark.parametrize("save", ["save_checkpoint", "unconvert", "load_checkpoint"])
@on_ranks(2)
def test_what_other_losses_have_trained_is_not_saved(rank: int, world_size: int, save: str, tmp_path: Path) -> None:
    """Another collection's gradients were exchanged; loading puts ranks in step again."""
    expected = "" if save == "load_checkpoint" else "backward_on_some_ranks"
    path = tmp_path / "saved"
    model, told = Towers(TYPES["row_wise"], world_size), []
    pooled = model(Batch(BOTH, 0))
    recfx.save_checkpoint(model, path)
    pooled[rank].sum().backward()
    calls = {
        "save_checkpoint": lambda: recfx.save_checkpoint(model, path),
        "unconvert": lambda: recfx.unconvert(model),
        "load_checkpoint": lambda: recfx.load_checkpoint(model, path),
        "load in vain": lambda: recfx.load_checkpoint(model, path / "none"),
        "forward": lambda: model(Batch(BOTH, 1)),
    }
    for call in (save, "load in vain", save, "load_checkpoint", "forward"):
        try:
            calls[call]()
            told.append("")
        except recfx.RecfxError as error:
            told.append(error.reason)
    assert told == [expected, "checkpoint_missing", expected, "", ""]


@pytest.mark.parametrize("losses", [[(0,), (1,)], [(1,)], [(0, 1), (0, 1), (0, 1), (0, 1)], []])
def test_losses_that_use_the_same_outputs_on_all_ranks(losses: list[tuple[int, ...]]) -> None:
    assert ranks(2).run(other_losses, "row_wise", TWICE, [losses]) == [[""] * 4] * 2


@fx.wrap  # type: ignore[misc]
def sum_of_used(outputs: list[torch.Tensor], used: torch.Tensor) -> torch.Tensor:
    return torch.stack([output.tanh().sum() for output, is_used in zip(outputs, used[0], strict=True) if is_used]).sum()


class Either(Two):
    """Its loss has only the collections whose number in the batch's first row is not 0."""

    def __init__(self, two: Two) -> None:
        nn.Module.__init__(self)
        self.first, self.second, self.over = two.first, two.second, two.over

    def forward(self, batch: DenseBatch) -> tuple[torch.Tensor, torch.Tensor]:
        both = [values_of(self.first(batch.features)), values_of(self.second(batch.features))]
        return sum_of_used(both, batch.dense), both[0].detach()


def pipelined_losses(rank: int, world_size: int, case: Case, pipeline: str) -> tuple[int, str]:
    """In which step this rank raises an error, and which, if the third step's losses use one collection each."""
    model = Either(sharded_model(case, world_size, "two"))
    driver = PIPELINES[pipeline](model, torch.optim.SGD(model.over.parameters(), lr=0.1), CPU)
    given: list[Any] = batches_of_rank(case, rank, world_size, 8, "two")
    given[2].dense[0, 1 - rank] = 0
    source = iter(given)
    for step in range(7):
        try:
            driver.progress(source)
        except recfx.OutOfStepError as error:
            return step, error.reason
    return 7, ""


@pytest.mark.parametrize(
    ("pipeline", "form", "width"),
    [("loop", "pooled", 16), ("base", "rows", 8), ("sparse_dist", "rows sent once", 8), ("recfx", "pooled", 8)],
)
def test_pipelines_notice_losses_without_a_collection(pipeline: str, form: str, width: int) -> None:
    """Ids of the next batch are sent before a backward, so they tell of the one before. Gradients may be too short."""
    of_form, table = FORMS[form], Table("a", 12, 8, ("f0",), sharding=("table_wise", 1))
    beside = of_form(Case((replace(table, dim=width),)))
    case = replace(of_form(Case((table,))), beside=beside)
    step = 4 if pipeline == "recfx" else 3
    assert ranks(2).run(pipelined_losses, case, pipeline) == [(step, "backward_on_some_ranks")] * 2


@pytest.mark.parametrize("batches", [3, 5])
@pytest.mark.parametrize("pipeline", ["sparse_dist", "recfx"])
@on_ranks(2)
def test_what_the_last_step_of_a_pipeline_left_out_is_not_saved(
    rank: int, world_size: int, pipeline: str, batches: int, tmp_path: Path
) -> None:
    """Whether the data have ended, or the next batch was sent ahead and is never computed."""
    case = Case((Table("a", 12, 8, ("f0",), sharding=("table_wise", 1)),))
    model = Either(sharded_model(replace(case, beside=case), world_size, "two"))
    driver = PIPELINES[pipeline](model, torch.optim.SGD(model.over.parameters(), lr=0.1), CPU)
    given: list[Any] = batches_of_rank(case, rank, world_size, batches, "two")
    given[2].dense[0, 1 - rank] = 0
    source = iter(given)
    for _ in range(3):
        driver.progress(source)
    with refused("backward_on_some_ranks", error=recfx.OutOfStepError):
        recfx.save_checkpoint(model, tmp_path / "checkpoint")
