"""The common base of the converted collections: one look-up, one public store, and no either-or elsewhere."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.collection import unsharded_collections
from recfx.collections.converted_collection import (
    collections_by_prefix,
    converted_collections,
)
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.sharding.shard import shard_collection
from tests.sharding.ranks import ranks


class TwoKinds(nn.Module):
    """One sharded and one unsharded collection; the unsharded one stands under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = _collection("whole")
        self.again = self.whole


def _collection(table: str) -> HashEmbeddingBagCollection:
    config = recfx.HashEmbeddingBagConfig(num_embeddings=64, embedding_dim=4, name=table, feature_names=[table])
    return HashEmbeddingBagCollection([config])


def both_kinds(rank: int, world_size: int) -> dict[str, object]:
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    model, cut = TwoKinds(), _collection("cut")
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=world_size, compute_device="cpu"))
    plan = planner.collective_plan(nn.ModuleDict({"cut": cut}), recfx.sharders(), env.process_group)
    model.cut = shard_collection(cut, plan.plan["cut"], env)
    sharded, whole = model.cut, model.whole
    return {
        "all": list(converted_collections(model)),
        "unsharded": list(unsharded_collections(model)),
        "sharded": list(sharded_collections(model)),
        "names": [prefix for prefix, _ in collections_by_prefix(model, HashEmbeddingBagCollection)],
        "kinds": [collection.is_sharded for collection in converted_collections(model).values()],
        "groups": [whole.process_group is None, sharded.process_group is env.process_group],
        "tables": [whole.tables_with_index(), sharded.tables_with_index()],
        "stores": [
            collection.store.weight(name) is collection.weight(name)
            for collection in (whole, sharded)
            for name in collection.embedding_bags
        ],
    }  # fmt: skip


def test_both_kinds_are_found_by_path_and_answer_alike() -> None:
    for answers in ranks(1).run(both_kinds):
        assert answers == {
            "all": ["whole", "cut"],
            "unsharded": ["whole"],
            "sharded": ["cut"],
            "names": ["whole.", "again."],
            "kinds": [False, True],
            "groups": [True, True],
            "tables": [["whole"], ["cut"]],
            "stores": [True, True],
        }
