"""Sharding options that are cheap for thousands of tables and ranks: TorchRec's planner hashes, copies and adds up all
shards of all options for each plan that it tries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torchrec.distributed.planner.types import PartitionByType, Shard, ShardingOption, Storage


class CopiedShard(Shard):
    """A shard whose copies share its estimates, which nobody changes."""

    def __deepcopy__(self, memo: object) -> CopiedShard:
        return CopiedShard([*self.size], [*self.offset], self.storage, self.perf, self.rank)


class PlacedShard(Shard):
    """A shard of a table that is on all ranks in turn: its first rank is its only one, whatever is set later."""

    @property
    def rank(self) -> int | None:
        return self._rank

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._rank = self.__dict__.get("_rank", rank)


class PlannedOption(ShardingOption):
    """TorchRec's option with final estimates, one for all shards of a size. Copies share the shards of a table that is
    on all ranks, because these have one rank each.
    """

    shards: Sequence[Shard]
    kinds: list[Shard]
    """A shard of each size, in the order in which they come first."""
    kind_of_shard: list[int]
    """For each shard, the place of its size in ``kinds``."""
    is_on_all_ranks: bool
    """Whether shard ``n`` is on rank ``n``."""

    @classmethod
    def of(cls, option: ShardingOption, shards: Sequence[Shard]) -> PlannedOption:
        """``option`` with its estimates of one shard of each size; ``shards`` are all its shards, without estimates."""
        planned = cls.__new__(cls)
        planned.__dict__.update(vars(option))
        known = {tuple(shard.size): number for number, shard in enumerate(option.shards)}
        planned.kinds, planned.kind_of_shard = list(option.shards), [known[tuple(shard.size)] for shard in shards]
        planned.is_on_all_ranks = option.partition_by == PartitionByType.UNIFORM.value
        estimates = [planned.kinds[number] for number in planned.kind_of_shard]
        planned.shards = [
            PlacedShard(shard.size, shard.offset, like.storage, like.perf, rank)
            if planned.is_on_all_ranks
            else CopiedShard(shard.size, shard.offset, like.storage, like.perf)
            for rank, (shard, like) in enumerate(zip(shards, estimates, strict=True))
        ]
        return planned

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.fqn, self.sharding_type, self.compute_kernel))

    def __eq__(self, other: object) -> bool:
        return self is other

    @cached_property
    def total_storage(self) -> Storage:
        return ShardingOption.total_storage.fget(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedOption:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(vars(self))
        if not self.is_on_all_ranks:
            copied.shards = [shard.__deepcopy__(memo) for shard in self.shards]
        return copied
