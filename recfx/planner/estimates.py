"""What TorchRec's planner knows of each shard that it places: its memory, and its time in a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ParameterConstraints, Perf, Shard, ShardingOption, Storage

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import index_of
from recfx.collections.sharding.types import TableWise, type_named
from recfx.ir import tables as ir
from recfx.ir.context import CollectionContext
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.ir.ways_back import AllToAllBack
from recfx.planner.pricing.formulas import formula_of
from recfx.planner.pricing.graph_prices import facts_of_shard
from recfx.planner.pricing.hardware import Constant, Hardware
from recfx.planner.pricing.node_facts import NodeFacts, Symbols
from recfx.planner.pricing.planned_collection import planned_with
from recfx.planner.pricing.times import seconds_of_collective, seconds_of_work
from recfx.planner.pricing.work import LENGTH


class IndexStorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's estimate of storage, plus the host memory of each shard's part of the table's index.

    TorchRec's planner does not ask the sharder (it does not call ``storage_usage``), so the index is counted here.
    """

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        super().estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            index = index_bytes(option.module[1], option.name)
            for shard in option.shards if index else ():
                rows = shard.size[0]
                shard.storage += Storage(hbm=0, ddr=math.ceil(index * rows / option.tensor.shape[0]))


def index_bytes(module: nn.Module, table: str) -> int:
    """Bytes of host memory that the index of a table takes, 0 without one; also known on the meta device."""
    index = index_of(module, table)
    return 0 if index is None else sum(buffer.nbytes for buffer in index.buffers())


class ShardTimes(EmbeddingPerfEstimator):
    """How long a shard of a converted collection keeps its rank busy: hashing and looking up, as ``recfx.cost`` counts
    them, and its ids and rows on the wire, without what whole nodes and calls cost. Other modules are TorchRec's.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None,
        collections: Mapping[str, UnshardedCollection],
        hardware: Hardware,
        device: str,
        trains: bool,
    ) -> None:
        super().__init__(topology, constraints)
        self._collections, self._world_size, self._device = collections, topology.world_size, device
        self._hardware, self._trains = replace(hardware, node_overhead=Constant(0.0, "counted for nodes")), trains
        self._context = cache(self._context_of)

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        super().estimate([one for one in sharding_options if one.path not in self._collections], sharder_data_map)
        for option in sharding_options:
            for shard in option.shards if option.path in self._collections else ():
                shard.perf = self._time(option, shard)

    def _context_of(self, path: str, kernel: str) -> CollectionContext:
        """The collection with its tables on one kernel; where they are does not matter."""
        collection, tables = self._collections[path], []
        for table in collection.tables:
            whole = ir.Shard(table, 0, (0, table.num_embeddings), (0, table.embedding_dim), name=table.name)
            tables.append(ShardedTable(table, TableWise(), kernel, AllToAllBack(), (whole,)))
        sharding = CollectionSharding(tuple(tables), 0, self._world_size)
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
        nodes = facts_of_shard(context, part, self._trains, symbols)
        phases = [(formula_of(facts.kind)(facts), context.copies_ids and facts.kind != "lookup") for facts in nodes]
        forward = sum(seconds_of_work(phase.forward, hardware, on_host) for phase, on_host in phases)
        backward = sum(seconds_of_work(phase.backward, hardware, on_host) for phase, on_host in phases)
        there, back = self._wire(option, nodes[0])
        return Perf(1e3 * forward, 1e3 * there, 1e3 * backward, 1e3 * back)

    def _wire(self, option: ShardingOption, facts: NodeFacts) -> tuple[float, float]:
        """The seconds of what arrives and leaves in the forward, and in the backward."""
        (load,), kind, ranks = facts.tables, type_named(option.sharding_type), self._world_size
        rows = load.returned_rows * load.spec.embedding_dim * load.spec.output_dtype.itemsize
        ids = self._seconds("all_to_all", 8 * (load.ids + load.bags))
        if kind.is_replicated:
            return ids, self._seconds("all_gather", rows / ranks) if self._trains else 0.0
        there, back = ("reduce_scatter", "all_gather") if kind.cuts_rows and facts.is_pooled else ("all_to_all",) * 2
        gradients = self._seconds(back, rows / ranks if back == "all_gather" else rows) if self._trains else 0.0
        return ids + self._seconds(there, rows), gradients

    def _seconds(self, operation: str, passed: float) -> float:
        latency = self._hardware.collective_latency[operation].value if self._world_size > 1 else 0.0
        return seconds_of_collective(operation, passed, self._world_size, self._hardware) - latency
