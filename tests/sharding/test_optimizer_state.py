"""The fused optimizer of sharded collections: TorchRec's names and layout, on every rank, around what kernels use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import recfx
from recfx.errors import CheckpointError
from tests.sharding.cases import Case, Model, build, plan_of, with_optimizer
from tests.sharding.ranks import ranks
from tests.sharding.stateful import assert_same, case_of, make, sharded_of, train, whole_state

STATES = {
    "sgd": (),
    "adagrad": ("momentum1",),
    "rowwise_adagrad": ("momentum1",),
    "adam": ("momentum1", "momentum2", "step"),
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


def dmp(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """As TorchRec's own training loops put it together."""
    standard, width = build(case)
    torch.manual_seed(1)
    model = Model(standard, width)
    model.sparse = with_optimizer(case, recfx.convert(standard, hashing=case.hashing))
    plan = ShardingPlan({"sparse": plan_of(case, model.sparse, world_size)})  # type: ignore[dict-item]
    parallel = DistributedModelParallel(model, plan=plan, sharders=recfx.sharders())
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
    found = whole_state(parallel.module)
    assert_same({k: v for k, v in found.items() if "/" in k}, {k: v for k, v in kept.items() if "/" in k})
    for group in fused.param_groups:
        group["lr"] = 0.0
    before = whole_state(parallel.module)
    train(parallel.module, case, rank, world_size, 3, 4)
    after = whole_state(parallel.module)
    weights = [key for key in before if key.endswith(".weight")]
    return {key: torch.equal(before[key], after[key]) for key in weights}


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_distributed_model_parallel_collects_saves_loads_and_schedules(optimizer: str) -> None:
    for found in ranks(2).run(dmp, case_of("mixed", None, optimizer)):
        assert all(found.values()), "a learning rate of 0 does not reach the kernels"


def blocks(rank: int, world_size: int, case: Case) -> str:
    sparse = sharded_of(make(case, world_size))
    before = whole_state(nn.ModuleDict({"sparse": sparse}))
    plain = {
        f"embedding_bags.{table.name}.weight": {f"{table.name}.momentum1": torch.ones(table.rows)}
        for table in case.tables
    }
    with pytest.raises(CheckpointError) as caught:
        sparse.fused_optimizer.load_state_dict({"state": plain})
    assert_same(whole_state(nn.ModuleDict({"sparse": sparse})), before)
    return caught.value.reason


def test_rowwise_state_of_another_number_of_column_blocks_is_refused() -> None:
    assert ranks(2).run(blocks, case_of("mixed", None, "rowwise_adagrad")) == ["shape_mismatch"] * 2


def copied(rank: int, world_size: int, case: Case) -> bool:
    sparse = sharded_of(make(case, world_size))
    groups = [id(each.group) for each in sparse.store.optimizers.values()]
    assert set(groups) <= {id(group) for group in sparse.fused_optimizer.param_groups}
    return len(set(groups)) < len(groups)


def test_shards_of_a_table_share_their_settings() -> None:
    assert any(ranks(2).run(copied, case_of("columns", None)))
