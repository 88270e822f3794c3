"""The fused optimizer of sharded collections: TorchRec's names and layout, on every rank, around what kernels use."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recfx.collections.sharding.collection import ShardedHashEmbeddingBagCollection
from recfx.errors import CheckpointError
from tests.sharding.cases import Case, model_and_plan, model_parallel
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.stateful import LRU, assert_same, case_of, make, sharded_of, train, whole_state
from tests.support.fake_group import fake_group
from tests.support.refusals import refused

STATES = {
    "sgd": (),
    "adagrad": ("momentum1",),
    "rowwise_adagrad": ("momentum1",),
    "adam": ("momentum1", "exp_avg_sq", "step"),
}


def describe(rank: int, world_size: int, case: Case) -> dict[str, dict[str, tuple[int, ...]]]:
    state = sharded_of(make(case, world_size)).fused_optimizer.state_dict()["state"]
    return {
        key: {
            name: tuple(value.metadata().size if isinstance(value, ShardedTensor) else value.shape)
            for name, value in entry.items()
        }
        for key, entry in state.items()
    }


@pytest.mark.parametrize("optimizer", sorted(STATES))
def test_all_ranks_have_torchrecs_names_and_sizes(optimizer: str) -> None:
    case = case_of("mixed", None, optimizer)
    first, second = ranks(2).run(describe, case)
    assert first == second
    for table in case.tables:
        entry = first[f"embedding_bags.{table.name}.weight"]
        assert sorted(entry) == sorted(f"{table.name}.{name}" for name in STATES[optimizer])
        if optimizer == "rowwise_adagrad":  # column blocks one after the other
            blocks = 2 if table.sharding[0] in ("column_wise", "grid_shard") else 1
            assert entry[f"{table.name}.momentum1"] == (blocks * table.rows,)
        elif optimizer != "sgd":
            assert entry[f"{table.name}.momentum1"] == (table.rows, table.dim)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@on_ranks(2)
def test_distributed_model_parallel_collects_saves_loads_and_schedules(
    rank: int, world_size: int, optimizer: str
) -> None:
    """As TorchRec's own training loops put it together."""
    case = case_of("mixed", None, optimizer)
    parallel = model_parallel(*model_and_plan(case, world_size))
    dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    assert sorted(dense) == ["over.bias", "over.weight"]
    both = CombinedOptimizer(
        [parallel.fused_optimizer, KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))]
    )
    both.zero_grad()
    train(parallel.module, case, rank, world_size, 0, 2)
    parallel.module.over.weight.square().sum().backward()  # type: ignore[union-attr, operator]
    both.step()
    fused = parallel.fused_optimizer
    fused.save_param_groups(True)
    saved = fused.state_dict()
    assert sorted(group["params"][0] for group in saved["param_groups"]) == sorted(saved["state"])
    live = whole_state(parallel.module)  # what DMP has collected at the start is what the kernels have trained
    for key, entry in saved["state"].items():
        for name, value in entry.items():
            if not isinstance(value, ShardedTensor):
                assert torch.equal(value, live[f"{key.removeprefix('sparse.')}/{name}"])
    kept = copy.deepcopy(live)
    train(parallel.module, case, rank, world_size, 2, 3)
    plain: dict[str, dict[str, torch.Tensor]] = {key: {} for key in saved["state"]}
    for key, value in kept.items():
        if "/" in key:
            table, _, name = key.partition("/")
            plain[f"sparse.{table}"][name] = value
    fused.save_param_groups(False)
    fused.load_state_dict({"state": plain})
    state = whole_state(parallel.module)
    assert_same({k: v for k, v in state.items() if "/" in k}, {k: v for k, v in kept.items() if "/" in k})
    for group in fused.param_groups:
        group["lr"] = 0.0
    before = whole_state(parallel.module)
    train(parallel.module, case, rank, world_size, 3, 4)
    after = whole_state(parallel.module)
    for key in before:
        assert not key.endswith(".weight") or torch.equal(before[key], after[key]), "a learning rate of 0 is not used"


# What does not fit, without other processes


@pytest.fixture
def collection(request: pytest.FixtureRequest) -> Iterator[ShardedHashEmbeddingBagCollection]:
    """Rank 0 of two, of this optimizer and these hash settings."""
    optimizer, hashing = request.param
    case = case_of("mixed", hashing, optimizer)
    with fake_group(0, 2):
        yield sharded_of(make(case, 2))


def states_of(collection: ShardedHashEmbeddingBagCollection) -> dict[str, torch.Tensor]:
    """Copies of what the kernels use."""
    return {
        f"{shard}/{name}": tensor.clone()
        for shard, optimizer in collection.store.optimizers.items()
        for name, tensor in optimizer.named_state().items()
    }


def load(collection: ShardedHashEmbeddingBagCollection, **states: Any) -> None:
    """``momentum1`` of these tables, and ones for those of all others."""
    names = {table.name: table for table in collection.tables}
    entries = {
        f"embedding_bags.{name}.weight": {
            f"{name}.momentum1": states.get(name, torch.ones(spec.num_embeddings, spec.embedding_dim))
        }
        for name, spec in names.items()
    }
    collection.fused_optimizer.load_state_dict({"state": entries})


SHARDED = "another table's ShardedTensor"


@pytest.mark.parametrize("collection", [("adagrad", None)], indirect=True)
@pytest.mark.parametrize(
    ("table", "saved", "reason"),
    [
        ("d", "nothing", "other_plan"),
        ("d", torch.ones(48, 256, device="meta"), "other_plan"),
        ("c", SHARDED, "other_plan"),
        ("b", SHARDED, "other_plan"),
        ("d", torch.ones(47, 256), "rows_mismatch"),
        ("d", torch.ones(48, 255), "rows_mismatch"),
        ("d", torch.ones(48), "rows_mismatch"),
    ],
)
def test_a_state_that_does_not_fit_changes_no_table(
    collection: ShardedHashEmbeddingBagCollection, table: str, saved: Any, reason: str
) -> None:
    if isinstance(saved, str) and saved == SHARDED:
        own = collection.fused_optimizer.state_dict()["state"]
        saved = own["embedding_bags.a.weight"]["a.momentum1"]
    before = states_of(collection)
    with refused(reason, f"{table}.momentum1", error=CheckpointError):
        load(collection, **{table: saved})
    torch.testing.assert_close(states_of(collection), before, rtol=0, atol=0)


@pytest.mark.parametrize("collection", [("rowwise_adagrad", None)], indirect=True)
@pytest.mark.parametrize(
    ("table", "saved", "reason"),
    [
        ("b", torch.ones(48), "rows_mismatch"),  # two column blocks
        ("b", torch.ones(48, 2), "rows_mismatch"),
        ("a", torch.ones(47), "rows_mismatch"),
        ("a", torch.ones(96), "rows_mismatch"),
    ],
)
def test_a_number_per_row_and_column_block(
    collection: ShardedHashEmbeddingBagCollection, table: str, saved: torch.Tensor, reason: str
) -> None:
    fitting = {"a": torch.ones(48), "b": torch.ones(96), "c": torch.ones(48), "d": torch.ones(96)}
    load(collection, **fitting)
    assert all(bool((value == 1).all()) for value in states_of(collection).values())
    with refused(reason, f"{table}.momentum1", error=CheckpointError):
        load(collection, **{**fitting, table: saved})


@pytest.mark.parametrize("collection", [("adagrad_from_a_half", LRU)], indirect=True)
def test_the_state_of_a_table_that_had_fewer_rows(collection: ShardedHashEmbeddingBagCollection) -> None:
    """Its rows are the first ones; the others begin as new rows do. In any dtype, but in no other shape."""
    collection.load_state_dict(
        {f"embedding_bags.{spec.name}.weight": torch.zeros(48, spec.embedding_dim) for spec in collection.tables}
    )
    doubles = {spec.name: torch.ones(48, spec.embedding_dim, dtype=torch.float64) for spec in collection.tables}
    load(collection, **doubles)
    for name, state in states_of(collection).items():
        if name.partition("/")[0] in ("b", "c"):  # all of their rows are here
            assert (state[:48] == 1).all(), name
            assert (state[48:] == 0.5).all(), name
    for wrong in (torch.ones(47, 256), torch.ones(48, 255), torch.ones(48), torch.ones(48, 256, 1)):
        with refused("rows_mismatch", error=CheckpointError):
            load(collection, **{**doubles, "d": wrong})
