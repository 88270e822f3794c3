"""What comes back from a checkpoint: every model, every optimizer, in the tensors that were there."""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import recfx
from recfx.collections.collection import unsharded_collections
from tests.builders.optimizers import attach
from tests.checkpoint import resume_worker
from tests.checkpoint.resume_worker import STEPS
from tests.checkpoint.training import CONFIGS, KINDS, RAW, OnePart, Training, TwoPart, WithSequences, assert_same, batch
from tests.support.forked_script import run_script

DERIVED = (".slot_groups",)  # may be laid out in another order


def without_derived(training: Training) -> dict[str, object]:
    return {name: value for name, value in training.everything().items() if not name.endswith(DERIVED)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_users_optimizers_share_their_state_with_the_fused_ones_as_before(tmp_path: Path, kind: str) -> None:
    source, target = Training.build(kind), Training.build(kind, seed=9)
    source.steps(0, 2)
    source.save(tmp_path)
    target.steps(0, 1)
    fused = target.model.first.fused_optimizers()["a"]
    tensors = dict(fused.state)
    weight = target.model.first.weight("a")
    target.load(tmp_path)
    attached = target.user_optimizers["first.embedding_bags.a.weight"]
    assert target.model.first.fused_optimizers()["a"] is fused
    assert attached.state[weight] is fused.state
    assert attached.param_groups[0] is fused.group
    assert all(fused.state[name] is tensor for name, tensor in tensors.items())
    target.steps(2, 3)
    if kind != "sgd":
        assert float(attached.state[weight]["step"]) == 3


def test_half_precision_tables_keep_their_float_state(tmp_path: Path) -> None:
    def build() -> Training:
        torch.manual_seed(0)
        model = recfx.convert(OnePart(200).bfloat16(), hashing=RAW)
        attach([model.first.weight("a")], torch.optim.Adagrad)
        dense = list(model.after.parameters())
        return Training(model, torch.optim.Adam(dense), {})

    def step(training: Training, number: int) -> None:
        pooled = training.model.first(batch(number)).values()
        pooled.square().sum().backward()

    source, target = build(), build()
    step(source, 0)
    source.save(tmp_path)
    target.load(tmp_path)
    for training in (source, target):
        step(training, 1)
    state = [training.model.first.fused_optimizers()["a"].state["sum"] for training in (source, target)]
    assert state[0].dtype == torch.float32
    assert torch.equal(state[0], state[1])
    assert_same(dict(target.model.state_dict()), dict(source.model.state_dict()))


@pytest.mark.parametrize("wrapped", ["compiled", "whole_graph", "in_place"])
def test_wrapped_models(tmp_path: Path, wrapped: str) -> None:
    source = Training.build(model_class=OnePart)
    source.steps(0, 2)
    torch.manual_seed(9)
    model: nn.Module = OnePart()
    arguments = {"whole_graph": (batch(0),), "in_place": None, "compiled": None}[wrapped]
    target = recfx.convert(
        model, arguments, hashing=RAW, whole_graph=wrapped == "whole_graph", inplace=wrapped == "in_place"
    )
    whole = torch.compile(target, backend="eager") if wrapped == "compiled" else target
    source.save(tmp_path)
    recfx.load_checkpoint(whole, tmp_path, in_backward=False)
    assert_same(dict(target.state_dict()), dict(source.model.state_dict()))
    recfx.save_checkpoint(whole, tmp_path)
    recfx.load_checkpoint(source.model, tmp_path, in_backward=False)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_under_distributed_data_parallel(tmp_path: Path) -> None:
    """The names are those of the model inside, so that either loads what the other has saved."""
    source, target = Training.build("adam"), Training.build("adam", seed=9)
    source.steps(0, 2)
    recfx.save_checkpoint(nn.parallel.DistributedDataParallel(source.model), tmp_path, optimizer=source.optimizer)
    target.load(tmp_path)
    assert_same(without_derived(target), without_derived(source))
    target = Training.build("adam", seed=10)
    wrapped = nn.parallel.DistributedDataParallel(target.model)
    recfx.load_checkpoint(wrapped, tmp_path, optimizer=target.optimizer)
    assert_same(without_derived(target), without_derived(source))


@pytest.mark.parametrize("model_class", [TwoPart, WithSequences])
def test_a_plain_model_and_an_adopted_one(model_class: type[nn.Module], tmp_path: Path) -> None:
    plain = model_class()
    for collection in (plain.first, plain.second):
        attach(collection, torch.optim.Adagrad)
    features = batch(0)
    features.values().remainder_(300)
    plain(features).sum().backward()
    recfx.save_checkpoint(plain, tmp_path)
    adopted = model_class()
    for collection in (adopted.first, adopted.second):
        attach(collection, torch.optim.Adagrad)
    adopted = recfx.convert(adopted)
    recfx.load_checkpoint(adopted, tmp_path)
    for one in (plain, adopted):
        one(features).sum().backward()
    torch.testing.assert_close(dict(adopted.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


def test_extra_states_of_all_plain_data(tmp_path: Path) -> None:
    state = {
        "numbers": [1, -(2**70), 0.1, float("inf"), True, None, 2 + 3j],
        (1, "two"): ({"a", 2}, b"\0\xff", "line\nbreak \ud800"),
        "ordered": OrderedDict(b=1, a=OrderedDict()),
        "torch": [torch.Size([2, 3]), torch.float16, torch.device("cpu")],
        "tensors": [torch.eye(2, dtype=torch.bfloat16), torch.empty(0, 3), torch.tensor(7)],
        "empty": [(), {}, [], set(), ""],
    }
    source, target = (Training.build(model_class=ExtraState, rows=40) for _ in range(2))
    source.model.calls = state
    source.save(tmp_path)
    target.load(tmp_path)
    calls = target.model.calls
    assert [type(item) for item in calls["ordered"].values()] == [int, OrderedDict]
    assert list(calls["ordered"]) == ["b", "a"]
    for one, two in zip(calls.pop("tensors"), state.pop("tensors"), strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    assert calls == state


class ExtraState(OnePart):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.calls = {"count": 0}

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.calls)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = dict(state)


def test_a_state_that_was_not_there_yet_starts_anew(tmp_path: Path) -> None:
    """Adagrad's sums do not start from 0 here."""
    saved, trained = Training.build("adagrad"), Training.build("adagrad", seed=1)
    for optimizer in saved.user_optimizers.values():
        optimizer.state.clear()
    saved.save(tmp_path)
    trained.steps(0, 2)
    trained.load(tmp_path)
    start = KINDS["adagrad"][1]["initial_accumulator_value"]
    for collection in unsharded_collections(trained.model).values():
        for fused in collection.fused_optimizers().values():
            assert bool((fused.state["sum"] == start).all())


POLICIES = {
    "error": recfx.HashConfig(dense_rows=0, buckets=4),
    "share": recfx.HashConfig(dense_rows=0, buckets=4, on_full="share"),
    "lru": recfx.HashConfig(dense_rows=0, buckets=4, on_full="evict"),
    "lfu": recfx.HashConfig(dense_rows=0, buckets=4, on_full="evict", evict="lfu"),
    "admit": recfx.HashConfig(dense_rows=0, buckets=4, admit_after=2),
    "lru_admit": recfx.HashConfig(dense_rows=0, buckets=4, on_full="evict", admit_after=3),
}
CHANGES = [
    ("error", "lru"), ("error", "lfu"), ("lru", "share"), ("lru", "error"), ("lfu", "lru"), ("lru", "lfu"),
    ("error", "admit"), ("admit", "error"), ("admit", "lru_admit"), ("lru_admit", "share"),
]  # fmt: skip


@pytest.mark.parametrize("rows", [300, 400])
@pytest.mark.parametrize(("source", "target"), CHANGES)
def test_one_policy_becomes_another(tmp_path: Path, source: str, target: str, rows: int) -> None:
    saved = Training.build(hashing=POLICIES[source], model_class=OnePart)
    saved.steps(0, 3)
    saved.save(tmp_path)
    left, right = (Training.build(hashing=POLICIES[target], model_class=OnePart, seed=3, rows=rows) for _ in range(2))
    left.steps(5, 6)
    right.steps(5, 6)
    left.load(tmp_path)
    right.model.load_state_dict(copy.deepcopy(saved.model.state_dict()), strict=False)
    assert_same(dict(left.model.state_dict()), dict(right.model.state_dict()))
    assert len(left.model.first.index("a")) == len(saved.model.first.index("a")) > 0
    left.steps(3, 5)


CASES = [
    (kind, config) for kind in KINDS for config in CONFIGS if kind == "adam" or config in ("raw", "evict_lfu_admit")
]
"""Every policy with one rule, and every rule with the simplest and the richest policy."""
Run = tuple[dict[str, Any], list[float], dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    """By case: state at the save, losses after it and state at the end; here without a stop, and resumed elsewhere."""
    folder = tmp_path_factory.mktemp("resume")
    here: dict[str, Run] = {}
    for kind, config in CASES:
        training = Training.build(kind, CONFIGS[config], model_class=WithSequences)
        training.steps(0, STEPS)
        for attached in training.user_optimizers.values():  # a schedule
            attached.param_groups[0]["lr"] *= 0.5
        before = training.everything()
        training.save(folder / f"{kind}-{config}")
        assert_same(training.everything(), before)
        losses = training.steps(STEPS, 2 * STEPS)
        here[f"{kind}-{config}"] = before, losses, training.everything()
    run_script(Path(resume_worker.__file__), str(folder), str(torch.get_num_threads())).check_returncode()
    return {case: (run, torch.load(folder / f"{case}.pt", weights_only=False)) for case, run in here.items()}


@pytest.mark.parametrize(("kind", "config"), CASES)
def test_resumed_training_is_the_same_to_the_bit(runs: dict[str, tuple[Run, Run]], kind: str, config: str) -> None:
    (before, losses, after), (loaded, resumed_losses, resumed) = runs[f"{kind}-{config}"]
    assert_same(loaded, {**before, **{name: loaded[name] for name in _not_saved(before)}})
    assert resumed_losses == losses
    assert_same(resumed, {**after, **{name: resumed[name] for name in _not_saved(after)}})
    moved = [name for name in after if name.startswith("model.") and not torch.equal(before[name], after[name])]
    weights = {"model.first.embedding_bags.a.weight", "model.second.embeddings.c.weight"}
    assert {*weights, "model.first.hash_indexes.a.row_ids", "model.second.hash_indexes.c.row_ids"} <= set(moved)


def _not_saved(state: dict[str, Any]) -> list[str]:
    """The slot table may be laid out in another order, and counts start anew; both hold the same ids."""
    return [name for name in state if name.endswith((".slot_groups",))]
