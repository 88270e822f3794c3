"""TorchRec's search space, in a fixed order, without what its planner would refuse."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PartitionByType,
    Shard,
    ShardingOption,
)
from torchrec.distributed.types import ModuleSharder

from recfx.collections.converted_collection import ConvertedCollection, index_of
from recfx.collections.sharding.types import type_named, type_names
from recfx.errors import ConversionError
from recfx.hashing import HashConfig, row_cuts
from recfx.planner.estimates import IndexStorageEstimator, ShardTimes
from recfx.planner.planned_option import PlannedOption


class OrderedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, with three differences. Its order does not depend on the process, as the order of sets of
    strings does, and so it cannot decide among equally good plans. Options that TorchRec's planner would choose
    and then refuse, those for whole hosts if the last host has fewer ranks, and cuts that leave ranks without rows, are
    not offered (``empty_ranks`` allows the latter where the constraints leave no other). Tables with an index are cut
    between buckets.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None,
        times: ShardTimes,
        *,
        empty_ranks: bool = False,
    ) -> None:
        self._empty_ranks = empty_ranks
        self._has_whole_hosts = topology.world_size % topology.local_world_size == 0
        estimators = [times, IndexStorageEstimator(topology, constraints)]
        super().__init__(topology, batch_size, constraints, estimators)

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Every way to shard every table, with estimates; ``no_sharding_option`` if all that are allowed need whole
        hosts that are not there, or leave ranks without rows.
        """
        options: list[ShardingOption] = super().enumerate(module, sharders)
        places = {fqn: place for place, fqn in enumerate(dict.fromkeys(option.fqn for option in options))}
        options = [option for option in options if is_plannable(option.sharding_type, option.compute_kernel)]
        if not self._has_whole_hosts:
            options = _not_by_host(options)
        filled = {option.fqn for option in options if not _has_empty_shard(option)}
        for option in options:
            if option.fqn not in filled and not self._empty_ranks:
                raise _only_empty(option)
        order = type_names()
        return sorted(
            (option for option in options if option.fqn not in filled or not _has_empty_shard(option)),
            key=lambda option: (places[option.fqn], order.index(option.sharding_type), option.compute_kernel),
        )

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate the shards in the sizes that they will really have, and each size once."""
        shards_of = []
        for option in sharding_options:
            _cut_between_buckets(option)
            shards_of.append(option.shards)
            sizes: dict[tuple[int, ...], Shard] = {}
            for shard in option.shards:
                sizes.setdefault(tuple(shard.size), shard)
            option.shards = list(sizes.values())
        super().populate_estimates(sharding_options)
        for place, shards in enumerate(shards_of):
            sharding_options[place] = PlannedOption.of(sharding_options[place], shards)


def is_plannable(sharding_type: str, kernel: str) -> bool:
    """Whether TorchRec's planner accepts the two together in its result."""
    return kernel not in type_named(sharding_type).unplanned_kernels


def _not_by_host(options: list[ShardingOption]) -> list[ShardingOption]:
    left = [option for option in options if option.partition_by != PartitionByType.HOST.value]
    others = {option.fqn for option in left}
    for option in options:
        if option.fqn not in others:
            advice = "pass a topology whose local_world_size divides its world_size, or allow other types."
            raise _no_option(option, "the hosts do not have equally many ranks", advice)
    return left


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


def _has_empty_shard(option: PlannedOption) -> bool:
    return any(shard.size[0] == 0 for shard in option.kinds)


def _only_empty(option: ShardingOption) -> ConversionError:
    module, filled = option.module[1], sum(shard.size[0] > 0 for shard in option.shards)
    pieces = sum(shard.offset[1] == 0 for shard in option.shards)
    index = index_of(module, option.name)
    problem = f"only {filled} of {len(option.shards)} shards would have any rows"
    if index is None or index.config.index_rows < pieces:
        advice = "allow table_wise or data_parallel for so small a table, or pass empty_ranks=True."
        return _no_option(option, f"it has {option.tensor.shape[0]} rows, so {problem}", advice)
    assert isinstance(module, ConvertedCollection)
    config = replace(module.requested.get(option.name) or HashConfig(), buckets=pieces)
    advice = f"convert it with hashing={{{option.name!r}: recfx.{config!r}}}, or a multiple of so many buckets; allow "
    advice += "table_wise; or pass empty_ranks=True."
    return _no_option(option, f"it is cut between its {index.config.buckets} buckets, so {problem}", advice)


def _no_option(option: ShardingOption, why: str, what_to_do: str) -> ConversionError:
    return ConversionError(
        f"table {option.name!r} cannot be sharded {option.sharding_type} as its constraints say: {why}.",
        reason="no_sharding_option",
        module_path=option.path,
        what_to_do=what_to_do,
    )
