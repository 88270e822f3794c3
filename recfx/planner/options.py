"""TorchRec's search space: every way to shard every table, with its memory and its time by recfx's estimates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PartitionByType,
    Perf,
    Shard,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ModuleSharder

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import index_of
from recfx.collections.sharding.types import type_named, type_names
from recfx.errors import ConversionError
from recfx.hashing import row_cuts
from recfx.ir import tables as ir
from recfx.ir.context import CollectionContext
from recfx.ir.shards import unsharded
from recfx.planner.pricing.graph_prices import costs_of_shard, load_of
from recfx.planner.pricing.hardware import Constant
from recfx.planner.pricing.node_facts import Symbols, TableLoad
from recfx.planner.pricing.planned_collection import planned_with
from recfx.planner.pricing.step_price import seconds_of_collective, seconds_of_work
from recfx.planner.pricing.work import LENGTH
from recfx.planner.topology import device_of, hardware_of


class ShardingOptions(EmbeddingEnumerator):
    """TorchRec's enumerator in an order that does not depend on the process, as that of sets of strings does.

    Options that TorchRec's planner would choose and then refuse, those for whole hosts if the last host has fewer
    ranks, and cuts that leave ranks without rows are left out (``empty_ranks`` allows the latter where the constraints
    leave no other). Tables with an index are cut between buckets.

    The memory of a shard has its part of the table's index. The time of a shard of one of the ``collections`` is that
    of hashing and looking up, as ``recfx.cost`` counts them, and of its ids and rows on the wire, without what whole
    nodes and calls cost. Times of other modules are TorchRec's.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None,
        collections: Mapping[str, UnshardedCollection],
        *,
        trains: bool,
        empty_ranks: bool = False,
    ) -> None:
        self._collections, self._trains, self._empty_ranks = collections, trains, empty_ranks
        self._has_whole_hosts = topology.world_size % topology.local_world_size == 0
        self._device = device_of(topology)
        self._hardware = replace(hardware_of(topology), node_overhead=Constant(0.0, "counted for nodes"))
        self._context = cache(self._context_of)
        self._times, self._storage = (
            estimator(topology, constraints) for estimator in (EmbeddingPerfEstimator, EmbeddingStorageEstimator)
        )
        super().__init__(topology, batch_size, constraints, [self._times, self._storage])

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
        others = [option for option in sharding_options if option.path not in self._collections]
        for estimator, options in ((self._storage, sharding_options), (self._times, others)):
            self._estimators = [estimator]
            super().populate_estimates(options)
        for option, shards in zip(sharding_options, shards_of, strict=True):
            index = index_bytes(option.module[1], option.name)
            estimated = {tuple(shard.size): shard for shard in option.shards}
            for shard in option.shards:
                shard.storage += Storage(hbm=0, ddr=math.ceil(index * shard.size[0] / option.tensor.shape[0]))
                if option.path in self._collections:
                    shard.perf = self._time(option, shard)
            for shard in shards:
                like = estimated[tuple(shard.size)]
                shard.storage, shard.perf = like.storage, like.perf
            option.shards = shards

    def _context_of(self, path: str, kernel: str) -> CollectionContext:
        """The collection with its tables on one kernel; where they are does not matter."""
        collection = self._collections[path]
        whole = unsharded(collection.tables)
        sharding = replace(whole, tables=tuple(replace(table, compute_kernel=kernel) for table in whole.tables))
        return planned_with(collection, path, sharding, self._device).context

    def _time(self, option: ShardingOption, shard: Shard) -> Perf:
        """In milliseconds."""
        context, hardware = self._context(option.path, option.compute_kernel), self._hardware
        table = context.by_name(local=False)[option.name]
        (row, column), (rows, columns) = shard.offset, shard.size
        part = ir.Shard(table, 0, (row, row + rows), (column, column + columns), name=table.name).spec
        lengths = dict(zip(table.feature_names, option.input_lengths, strict=False))
        lengths |= dict(zip(table.sent_lengths, option.input_lengths, strict=False))
        symbols = Symbols(option.batch_size, self._world_size, lambda name: lengths.get(name, LENGTH), float)
        nodes = costs_of_shard(context, part, self._trains, symbols=symbols)
        forward, backward = (
            sum(seconds_of_work(getattr(node, phase), hardware, node.on_host) for node in nodes)
            for phase in ("forward", "backward")
        )
        there, back = self._wire(option, load_of(context, part, symbols), context.is_pooled)
        return Perf(1e3 * forward, 1e3 * there, 1e3 * backward, 1e3 * back)

    def _wire(self, option: ShardingOption, load: TableLoad, is_pooled: bool) -> tuple[float, float]:
        """The seconds of what arrives and leaves in the forward, and in the backward."""
        kind, ranks = type_named(option.sharding_type), self._world_size
        rows = load.returned_rows * load.spec.embedding_dim * load.spec.output_dtype.itemsize
        ids = self._seconds("all_to_all", 8 * (load.ids + load.bags))
        if kind.is_replicated:
            return ids, self._seconds("all_gather", rows / ranks) if self._trains else 0.0
        there, back = ("reduce_scatter", "all_gather") if kind.cuts_rows and is_pooled else ("all_to_all",) * 2
        gradients = self._seconds(back, rows / ranks if back == "all_gather" else rows) if self._trains else 0.0
        return ids + self._seconds(there, rows), gradients

    def _seconds(self, operation: str, passed: float) -> float:
        latency = self._hardware.collective_latency[operation].value if self._world_size > 1 else 0.0
        return seconds_of_collective(operation, passed, self._world_size, self._hardware) - latency


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
