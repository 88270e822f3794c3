"""insert_dist: adds the communication that the sharding plan requires, as explicit nodes.

Between ``select_features`` and the lookups, ids are sent to the ranks whose shards they read (``bucketize`` if rows are
cut, ``input_dist_start``, ``input_dist_wait``). The lookups become those of this rank's shards. After them, pooled rows
are sent back to the ranks of the samples (``output_dist_start``, ``output_dist_wait``), once per way back. Lookups pool
sums; ``mean_divide`` comes last and uses the lengths of this rank's own batch. Rows that are not pooled are sent back
to where their ids came from. What an ``output_dist`` must know about the ``input_dist`` travels on an edge.

All ranks run the same collectives in the same order, even those that have no shard of some tables.
"""

from torch import fx

from recfx.ir.node_kinds import ASSEMBLERS, NOT_COMBINED
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.shards import CollectionSharding
from recfx.ir.verifier import GraphVerificationError
from recfx.ir.ways_back import WayBack
from recfx.passes.base import PassResult


def insert_dist(graph: OperatorGraph) -> PassResult:
    """Distribute every collection that is sharded."""
    for output in graph.of_kind(*ASSEMBLERS):
        sharding = graph.collection(output).sharding
        if sharding is not None:
            _Distribution(graph, output, sharding).insert()
    return PassResult(graph)


class _Distribution:
    """Replaces the nodes that ``expand_collection`` has put after the ``select_features`` of one collection."""

    def __init__(self, graph: OperatorGraph, output: fx.Node, sharding: CollectionSharding) -> None:
        self.graph, self.output, self.sharding = graph, output, sharding
        self.collection, self.is_pooled = graph.collection(output).name, graph.collection(output).is_pooled
        lookups = [node for node in graph.of_kind("lookup") if graph.collection(node).name == self.collection]
        self.lookup_of = {table.name: lookup for lookup in lookups for table in graph.tables(lookup)}
        self.ids = lookups[0].all_input_nodes[0]

    def insert(self) -> None:
        self.refuse_others()
        with self.graph.graph.inserting_before(self.output):
            ids, context = self.distribute_ids()
            ways = self.sharding.ways_back
            started = [self.look_up(way, ids, context) for way in ways]
            arrived = [self.collect(way, node, context) for way, node in zip(ways, started, strict=True)]
            own_ids = () if self.is_pooled else (self.ids,)
            assembled = self.add(self.graph.kind(self.output), *arrived, *own_ids)
        self.graph.replace(self.output, assembled)
        self.graph.remove_unused()  # the lookups of whole tables; and the ids of a rank without shards

    def refuse_others(self) -> None:
        """Refuse operators beside or after the lookups of whole tables, which are replaced: no operator may be lost."""
        for node in self.output.all_input_nodes if self.is_pooled else self.output.all_input_nodes[:-1]:
            problem = ""
            if self.graph.kind(node) != "lookup":
                problem = (
                    f"the lookup before this {self.graph.kind(node)} becomes those of shards, so its pass "
                    "must run after insert_dist"
                )
            elif self.is_pooled and node.kwargs["combine"] == NOT_COMBINED:
                problem = f"rows with combine={NOT_COMBINED} cannot be sent back in a collection that is pooled"
            elif tuple(node.all_input_nodes) != (self.ids,):
                problem = f"all ids are sent at once, so all lookups must read {self.ids.name}"
            if problem:
                raise GraphVerificationError(f"after pass insert_dist: node {node.name}: {problem}")

    def distribute_ids(self) -> tuple[fx.Node, fx.Node]:
        """The ids of this rank's shards, and the dist context."""
        routed = self.add("bucketize", self.ids) if self.sharding.cuts_rows else self.ids
        started = self.add("input_dist_start", routed)
        in_flight = self.graph.item(started, 0, "ids_in_flight")
        context_in_flight = self.graph.item(started, 1, "dist_context_in_flight")
        arrived = self.add("input_dist_wait", in_flight, context_in_flight)
        return self.graph.item(arrived, 0, "ids"), self.graph.item(arrived, 1, "dist_context")

    def look_up(self, way: WayBack, ids: fx.Node, context: fx.Node) -> fx.Node:
        """Add the lookups of this rank's shards with this way back, and the node that sends their rows off."""
        mine = [shard for shard in self.sharding.local() if self.sharding.named(shard.table.name).way_back == way]
        combine = "SUM" if self.is_pooled else NOT_COMBINED
        kernels = [self.lookup_of[shard.table.name].kwargs.get("kernel") for shard in mine]
        lookups = [
            self.add("lookup", ids, tables=(shard.name,), combine=combine, kernel=kernel)
            for shard, kernel in zip(mine, kernels, strict=True)
        ]
        return self.add("output_dist_start", *lookups, context, way=way.name)

    def collect(self, way: WayBack, started: fx.Node, context: fx.Node) -> fx.Node:
        """Add the nodes that receive the rows of this rank's samples."""
        for hop in range(1, len(way.steps)):
            arrived = self.add("output_dist_wait", started)
            started = self.add("output_dist_start", arrived, context, way=way.name, hop=hop)
        arrived = self.add("output_dist_wait", started)
        tables = [table.name for table in self.sharding.tables_of(way)]
        divided = tuple(table for table in tables if self.lookup_of[table].kwargs["combine"] == "MEAN")
        return self.add("mean_divide", arrived, self.ids, divided=divided) if divided else arrived

    def add(self, kind: str, *inputs: fx.Node, **attributes: object) -> fx.Node:
        return self.graph.add(kind, inputs, self.collection, **attributes)
