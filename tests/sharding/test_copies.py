"""What becomes of a sharded collection that is copied, and what it takes over from the unsharded one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.sharding.collection import (
    ShardedHashEmbeddingBagCollection,
    leave_to_collections,
    shard_collection,
)
from recfx.runtime import InputDistStart, Lookup, OutputDistStart
from tests.sharding.cases import Case, Table, build, plan_of, with_optimizer
from tests.support.fake_group import fake_group

CASE = Case(
    (
        Table("a", 32, 8, ("f0",), "SUM", ("table_wise", 0)),
        Table("b", 32, 8, ("f1",), "MEAN", ("column_wise", 0, 0)),
        Table("c", 32, 8, ("f2",), "SUM", ("row_wise",)),
    ),
    optimizer="adagrad",
    hashing=recfx.HashConfig(dense_rows=0, buckets=4),
)


def sharded(training: bool = True) -> ShardedHashEmbeddingBagCollection:
    converted = with_optimizer(CASE, recfx.convert(build(CASE)[0], hashing=CASE.hashing)).train(training)
    assert isinstance(converted, recfx.HashEmbeddingBagCollection)
    return shard_collection(converted, plan_of(CASE, converted, 2), ShardingEnv.from_process_group(dist.group.WORLD))


def test_a_copy_has_its_own_tables_the_same_groups_and_what_else_was_shared() -> None:
    with fake_group(0, 2):
        module: Any = sharded()
        weight = module.store.weight("b@1")
        module.notes = [module]
        together = copy.deepcopy({"weight": weight, "module": module, "again": weight})
        duplicate = together["module"]
        assert duplicate is not module
        assert duplicate.notes == [duplicate]
        assert duplicate.store.weight("b@1") is together["weight"] is together["again"]
        assert duplicate.store.weight("b@1") is dict(duplicate.named_parameters())["embedding_bags.b@1.weight"]
        assert torch.equal(together["weight"], weight)
        assert together["weight"].data_ptr() != weight.data_ptr()
        assert all(vars(duplicate.groups)[name] is group for name, group in vars(module.groups).items())
        assert duplicate.index("a") is not module.index("a")


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_unsharded_module_stays(training: bool) -> None:
    with fake_group(0, 2):
        module = sharded(training)
        assert {submodule.training for submodule in module.modules()} == {training}


def test_what_torchrec_finds_on_its_own_sharded_modules() -> None:
    with fake_group(0, 2):
        module = sharded()
        of_kind = {
            kind: [node for node in module.graph_module.modules() if isinstance(node, kind)]
            for kind in (InputDistStart, Lookup, OutputDistStart)
        }
        assert [len(nodes) for nodes in of_kind.values()] == [1, 2, 2]
        assert [module._input_dists, module._lookups, module._output_dists] == list(of_kind.values())
        assert module._has_uninitialized_input_dist is False
        assert set(module.sharded_parameter_names("sparse")) == {
            f"sparse.embedding_bags.{name}.weight" for name in ("a", "b", "b@1", "c")
        }


def test_shards_are_held_in_bags_of_their_size() -> None:
    with fake_group(0, 2):
        bags: Any = sharded().embedding_bags
        described = {
            name: (bag.num_embeddings, bag.embedding_dim, bag.mode, bag.include_last_offset)
            for name, bag in bags.items()
        }
        assert described == {
            "a": (32, 8, "sum", True),
            "b": (32, 4, "mean", True),
            "b@1": (32, 4, "mean", True),
            "c": (16, 8, "sum", True),
        }
        with pytest.raises(recfx.ConversionError, match="unsupported_bag_option"):
            bags["a"].mode = "max"


def test_data_parallel_ignores_tables_besides_what_it_ignored_before() -> None:
    """Around the model, and around any part of it; dense parts have nothing to ignore."""
    with fake_group(0, 2):
        tower = nn.ModuleDict({"sparse": sharded(), "dense": nn.Linear(2, 2)})
        model: Any = nn.ModuleDict({"tower": tower, "over": nn.Linear(2, 2)})
        model._ddp_params_and_buffers_to_ignore = ["over.bias"]
        leave_to_collections(model)
        tables = {f"embedding_bags.{name}.weight" for name in ("a", "b", "b@1", "c")}
        for around, before in ((model, "tower.sparse."), (tower, "sparse."), (tower["sparse"], "")):
            ignored = set(around._ddp_params_and_buffers_to_ignore)
            assert ignored >= {f"{before}{name}" for name in tables} | {f"{before}hash_indexes.a.row_ids"}
            assert not any("dense" in name for name in ignored)
            assert ("over.bias" in ignored) == (around is model)
        assert not hasattr(tower["dense"], "_ddp_params_and_buffers_to_ignore")
