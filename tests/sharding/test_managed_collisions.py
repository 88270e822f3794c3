"""A model whose managed collisions were converted, sharded: ids, rows and outputs are those of the unsharded one."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

import recfx
from tests.builders.managed_collisions import DIM, FEATURES, LEARNED, ROWS, Model, batch, hash_zch, learn, managed, mch
from tests.builders.optimizers import attach
from tests.sharding.cases import Case, Table, concatenate, shard_converted
from tests.sharding.ranks import on_ranks, ranks
from tests.support.pairwise import pairwise
from tests.support.refusals import refused

PLANS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "rows": (("row_wise",), ("row_wise",)),
    "tables": (("table_wise", 1), ("table_wise", 0)),
    "columns": (("column_wise", 1, 0), ("table_wise", 1)),
    "replicas": (("data_parallel",), ("row_wise",)),
}
STEPS = 5
UNKNOWN = 12345


def batches(world_size: int) -> list[list[Any]]:
    """By step and rank: ids that were learned before, new ones, and in the end more than there are rows."""
    return [
        [
            batch([*LEARNED[:3], 500 + step, 500 + rank], [7, 900 + step], [1, 2, 10**15, 40 + rank, 60 + step])
            for rank in range(world_size)
        ]
        for step in range(STEPS)
    ]


def converted(is_pooled: bool, module: str) -> Any:
    torch.manual_seed(0)
    collection = managed(is_pooled, hash_zch if module == "hash_zch" else mch)
    hashing = recfx.HashConfig()
    if module == "mch":
        learn(collection)
    elif module == "new":
        hashing = recfx.HashConfig(rows=2 * ROWS, buckets=2, on_full="evict", unseen="row")
    else:
        for remap in collection._managed_collision_collection._managed_collision_modules.values():
            remap._hash_zch_identities.data[[2, 5, 11], 0] = torch.tensor([7, 10**12, 1])
    model: Any = Model(collection)
    model = recfx.convert(model, managed_collisions="convert", hashing=dict.fromkeys(FEATURES, hashing)).train()
    attach(model.mc._embedding_module, "adagrad")
    return model


def returns_rows() -> Any:
    collection = managed(False, return_remapped_features=True)
    attach(collection._embedding_module, "sgd")
    return recfx.convert(Model(collection), managed_collisions="convert")


@on_ranks(2)
def test_rows_are_not_returned_from_several_ranks(rank: int, world_size: int) -> None:
    """By TorchRec, and by hand, which nothing sees before the first call."""
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with refused("rows_of_sharded", "mc"):
        DistributedModelParallel(returns_rows(), env, torch.device("cpu"), sharders=recfx.sharders())
    tables = tuple(Table(name, ROWS, DIM, tuple(names), sharding=("row_wise",)) for name, names in FEATURES.items())
    for copied in (False, True):
        model = returns_rows()
        model = copy.deepcopy(model) if copied else model
        inner = model.mc._embedding_module
        model.mc._embedding_module = shard_converted(Case(tables, is_pooled=False), inner, world_size)
        with refused("rows_of_sharded", "mc._embedding_module"):
            model(batch(LEARNED, [7], [3]))
        assert not any(len(index) for index in model.mc._embedding_module.hash_indexes.values())


def trained(model: Any, features: list[Any], parts: int) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Outputs of every step and of one in eval mode; ids and their rows, by table."""
    outputs = []
    for step in features:
        values = model(step)
        outputs.append([value.detach() for value in values])
        sum((value * value).sum() for value in values).div(parts).backward()
    unknown = model.eval()(batch([UNKNOWN], [UNKNOWN], [UNKNOWN]))
    outputs.append([value.detach() for value in unknown])
    plain, mapping = recfx.unconvert(model, with_mapping=True)
    weights = dict(zip(FEATURES, (weight.detach() for weight in plain.parameters()), strict=True))
    rows_of_ids = {}
    for table, (ids, rows) in mapping.items():
        (name,) = [name for name in FEATURES if table.endswith(name)]
        rows_of_ids[name] = dict(zip(ids.tolist(), weights[name][rows], strict=True))
    return outputs, rows_of_ids


def trained_sharded(rank: int, world_size: int, is_pooled: bool, module: str, plan: str) -> Any:
    model = converted(is_pooled, module)
    rows = model.mc.weight("a").shape[0]
    tables = tuple(
        Table(name, rows, DIM, tuple(features), sharding=sharding)
        for (name, features), sharding in zip(FEATURES.items(), PLANS[plan], strict=True)
    )
    inner = model.mc._embedding_module
    model.mc._embedding_module = shard_converted(Case(tables, is_pooled=is_pooled), inner, world_size)
    return trained(model, [of_ranks[rank] for of_ranks in batches(world_size)], 1)


@pairwise(plan=PLANS, module=["mch", "hash_zch", "new"], is_pooled=[True, False])
def test_training_goes_on_as_unsharded(is_pooled: bool, module: str, plan: str) -> None:
    world_size = 2
    whole = [concatenate(of_ranks) for of_ranks in batches(world_size)]
    outputs, rows_of_ids = trained(converted(is_pooled, module), whole, world_size)
    answers = ranks(world_size).run(trained_sharded, is_pooled, module, plan)
    for step in range(STEPS):
        for key, expected in enumerate(outputs[step]):
            parts = [of_rank[step][key] for of_rank, _ in answers]
            torch.testing.assert_close(torch.cat(parts), expected, msg=lambda m, s=step, k=key: f"{s}, {k}: {m}")
    for of_rank, held_by_rank in answers:
        torch.testing.assert_close(of_rank[STEPS], outputs[STEPS])
        assert {name: list(ids) for name, ids in held_by_rank.items()} == {
            name: list(ids) for name, ids in rows_of_ids.items()
        }
        torch.testing.assert_close(held_by_rank, rows_of_ids)
    known = {10**12, 7} if module == "hash_zch" else set(LEARNED[:3])
    assert known <= rows_of_ids["a"].keys()
