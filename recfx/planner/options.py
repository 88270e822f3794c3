"""TorchRec's search space: every way to shard every table, with TorchRec's estimates of its memory and its time."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PartitionByType,
    Shard,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ModuleSharder

from recfx.collections.converted_collection import index_of
from recfx.collections.sharding.types import type_named, type_names
from recfx.errors import ConversionError
from recfx.hashing import row_cuts


class ShardingOptions(EmbeddingEnumerator):
    """TorchRec's enumerator in an order that does not depend on the process, as that of sets of strings does.

    Options that TorchRec's planner would choose and then refuse, those for whole hosts if the last host has fewer
    ranks, and cuts that leave ranks without rows are left out (``empty_ranks`` allows the latter where the constraints
    leave no other). Tables with an index are cut between buckets.

    The memory of a shard has its part of the table's index.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None,
        *,
        empty_ranks: bool = False,
    ) -> None:
        self._empty_ranks = empty_ranks
        self._has_whole_hosts = topology.world_size % topology.local_world_size == 0
        super().__init__(topology, batch_size, constraints)

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Every way to shard every table, with estimates; ``no_sharding_option`` if a table has none."""
        options: list[ShardingOption] = super().enumerate(module, sharders)
        options = [option for option in options if is_plannable(option.sharding_type, option.compute_kernel)]
        places = {fqn: place for place, fqn in enumerate(dict.fromkeys(option.fqn for option in options))}
        by_host = PartitionByType.HOST.value
        kept = [option for option in options if self._has_whole_hosts or option.partition_by != by_host]
        chosen = [option for option in kept if all(shard.size[0] > 0 for shard in option.shards)]
        if self._empty_ranks:  # for tables that have no other option
            chosen += _without(kept, chosen)
        for option in _without(options, chosen):
            raise _no_option(option)
        order = type_names()
        return sorted(chosen, key=lambda one: (places[one.fqn], order.index(one.sharding_type), one.compute_kernel))

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate the shards in the sizes that they will really have, and each size once."""
        shards_of = []
        for option in sharding_options:
            _cut_between_buckets(option)
            shards_of.append(option.shards)
            option.shards = list({tuple(shard.size): shard for shard in reversed(option.shards)}.values())
        super().populate_estimates(sharding_options)
        for option, shards in zip(sharding_options, shards_of, strict=True):
            index = index_bytes(option.module[1], option.name)
            estimated = {tuple(shard.size): shard for shard in option.shards}
            for shard in option.shards:
                shard.storage += Storage(hbm=0, ddr=math.ceil(index * shard.size[0] / option.tensor.shape[0]))
            for shard in shards:
                like = estimated[tuple(shard.size)]
                shard.storage, shard.perf = like.storage, like.perf
            option.shards = shards


def index_bytes(module: nn.Module, table: str) -> int:
    """Bytes of host memory that the index of a table takes, 0 without one; also known on the meta device."""
    index = index_of(module, table)
    return 0 if index is None else sum(buffer.nbytes for buffer in index.buffers())


def is_plannable(sharding_type: str, kernel: str) -> bool:
    """Whether TorchRec's planner accepts the two together in its result."""
    return kernel not in type_named(sharding_type).unplanned_kernels


def _cut_between_buckets(option: ShardingOption) -> None:
    """Give the shards of a table with an index the rows that ``read_plan`` of sharded collections gives them."""
    index = index_of(option.module[1], option.name)
    if index is None or not type_named(option.sharding_type).cuts_rows:
        return
    blocks: dict[int, list[Shard]] = {}  # by first column
    for shard in option.shards:
        blocks.setdefault(shard.offset[1], []).append(shard)
    for shards in blocks.values():
        borders = row_cuts(index.config, len(shards))
        for shard, (begin, end) in zip(shards, pairwise(borders), strict=True):
            shard.offset[0], shard.size[0] = begin, end - begin


def _without(options: list[ShardingOption], others: list[ShardingOption]) -> list[ShardingOption]:
    """The options of tables that have none among the others."""
    tables = {option.fqn for option in others}
    return [option for option in options if option.fqn not in tables]


def _no_option(option: ShardingOption) -> ConversionError:
    filled = sum(shard.size[0] > 0 for shard in option.shards)
    return ConversionError(
        f"table {option.name!r} cannot be sharded {option.sharding_type} as its constraints say: {filled} of "
        f"{len(option.shards)} shards would have any of its rows, which are cut between buckets, or the hosts do not "
        "have equally many ranks.",
        reason="no_sharding_option",
        module_path=option.path,
        what_to_do="allow other types, such as table_wise; or else, for hosts, pass a topology whose local_world_size "
        "divides its world_size, and for rows, convert with more buckets or pass empty_ranks=True.",
    )
