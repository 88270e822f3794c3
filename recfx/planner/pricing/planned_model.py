"""The collections of a model as a plan shards them, or as they are sharded already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.optimizer_settings import optimizer_settings
from recfx.collections.sharding.plan import read_plan
from recfx.ir.shards import CollectionSharding
from recfx.planner.pricing.planned_tables import PlannedCollection, TableTraits


def planned_as_sharded(collection: ConvertedCollection) -> PlannedCollection:
    """A collection that is sharded; nothing is communicated."""
    assert isinstance(collection, ShardedCollection)
    traits = {}
    for table in collection.tables:
        local = collection.local_shards(table.name)
        trained = not local or collection.weight(local[0].name).requires_grad
        traits[table.name] = TableTraits(collection.dtypes[table.name], collection.fused.get(table.name), trained)
    return planned_of(collection, collection.collection, collection.sharding, traits)


def planned_by(
    collection: UnshardedCollection, plan: Mapping[str, Any], world_size: int, path: str = ""
) -> PlannedCollection:
    """A collection as a plan would shard it; nothing is sharded.

    Args:
        collection: a converted collection, which may be on meta.
        plan: the sharding of each table.
        world_size: the number of ranks.
        path: fully qualified name of the collection.

    Raises:
        ConversionError: the same as ``read_plan``.
    """
    sharding = read_plan(collection.tables, plan, 0, world_size, path)
    return planned_of(collection, path, sharding, traits_of(collection, sharding))


def planned_of(
    collection: ConvertedCollection, path: str, sharding: CollectionSharding, traits: Mapping[str, TableTraits]
) -> PlannedCollection:
    """A collection with its shards and traits; ``path`` is its fully qualified name."""
    return PlannedCollection(
        path,
        sharding,
        traits,
        collection.is_weighted(),
        max(collection.calls, 1),
        collection.backend,
        collection.source,
        collection.passes,
    )


def traits_of(collection: UnshardedCollection, sharding: CollectionSharding) -> dict[str, TableTraits]:
    """What the plan of some tables of a collection does not say, by table name."""
    fused = optimizer_settings(collection, sharding, None, dense_as_torchrec=False).fused
    found = {}
    for each in sharding.tables:
        weight = collection.weight(each.table.name)
        found[each.table.name] = TableTraits(weight.dtype, fused.get(each.table.name), weight.requires_grad)
    return found
