"""A graph of operators with its context: how passes read and edit it, and what follows from a node."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.ir.context import CollectionContext, Context, LookupFacts, Served, Targets
from recfx.ir.node_kinds import NODE_KINDS, Stage
from recfx.ir.operators import kind_of, operator_of
from recfx.ir.tables import Columns, TableSpec, columns_of
from recfx.ir.ways_back import Hop


def node_name(collection: str, kind: str) -> str:
    """``<collection fqn>_<node>``, or ``ebc_<node>`` for a root, in which torch.fx would replace nothing."""
    name = re.sub(r"[^0-9a-zA-Z_]+", "_", f"{collection or 'ebc'}_{kind}")
    return f"_{name}" if name[0].isdigit() else name


@dataclass(eq=False)
class OperatorGraph:
    """An fx graph of operators and what it is about. A pass gets a copy of its own, which it may edit in place.

    Attributes of nodes are keyword arguments: bool, int, float, str, dtype, or flat tuples of these.
    """

    graph: fx.Graph
    context: Context

    @classmethod
    def of(cls, collection: CollectionContext, targets: Targets) -> OperatorGraph:
        """The graph of one collection before the first pass: input, the collection as one leaf, output."""
        whole = cls(fx.Graph(), Context({collection.name: collection}, targets))
        features = whole.graph.create_node("placeholder", "features", type_expr=KeyedJaggedTensor, name="features")
        whole.graph.output(whole.add("collection", (features,), collection.name))
        return whole

    def copy(self) -> OperatorGraph:
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return OperatorGraph(graph, self.context)

    # Reading

    def of_kind(self, *kinds: str) -> list[fx.Node]:
        return [node for node in self.graph.nodes if self.kind(node) in kinds]

    @property
    def operators(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if kind_of(node) is not None]

    def kind(self, node: fx.Node) -> str:
        """The name of a node's kind; ``""`` if it is not an operator."""
        kind = kind_of(node)
        return "" if kind is None else kind.name

    def collection(self, node: fx.Node) -> CollectionContext:
        return self.context.collections[str(node.kwargs["collection"])]

    def tables(self, node: fx.Node) -> tuple[TableSpec, ...]:
        """The tables that a node works on; this rank's shards, if its kind says so."""
        kind, collection = self.kind(node), self.collection(node)
        if "tables" in node.kwargs:
            return self.named(node, names_in(node, "tables"))
        if kind in ("mean_divide", "output_dist_wait", "expand_rows") or NODE_KINDS[kind].like_input:
            return self.tables(source_of(node))
        if kind == "output_dist_start":
            assert collection.sharding is not None
            return collection.sharding.tables_of(collection.way(str(node.kwargs["way"])))
        return collection.local if self.works_on_shards(node) else collection.tables

    def named(self, node: fx.Node, names: tuple[str, ...]) -> tuple[TableSpec, ...]:
        """Tables by the names that an attribute of a node has: a shard may have the name of its table."""
        tables = self.collection(node).by_name(self.works_on_shards(node))
        return tuple([tables[name] for name in names])

    def works_on_shards(self, node: fx.Node) -> bool:
        """Whether the node's tables are shards of this rank: its kind says so, and its ids have arrived there."""
        kind = NODE_KINDS.get(self.kind(node))
        if kind is not None and kind.like_input and node.all_input_nodes:
            return self.works_on_shards(source_of(node))
        is_local = kind is not None and kind.stage in (Stage.INPUT_DIST, Stage.HASH, Stage.LOOKUP)
        if not is_local or self.collection(node).sharding is None:
            return False
        source = node
        while source.all_input_nodes and self.kind(source) != "input_dist_wait":
            source = source.all_input_nodes[0]
        return self.kind(source) == "input_dist_wait"

    def columns(self, node: fx.Node) -> list[Columns]:
        """The columns of output keys that the pooled rows of a node hold, in order."""
        kind, collection = self.kind(node), self.collection(node)
        if kind in ("lookup", "hash_lookup"):
            return columns_of(self.tables(node))
        if kind in ("mean_divide", "expand_rows") or NODE_KINDS[kind].like_input:
            return self.columns(source_of(node))
        if kind == "output_dist_wait":
            start, sharding = source_of(node), collection.sharding
            assert sharding is not None
            way = collection.way(str(start.kwargs["way"]))
            following = collection.hops(way.name)[hop_of(start) + 1 :]
            return list(following[0].columns) if following else way.arriving(sharding.travelling(way))
        raise ValueError(f"{node.name}: a {kind} holds no pooled rows")

    def hop(self, start: fx.Node) -> Hop:
        return self.collection(start).hops(str(start.kwargs["way"]))[hop_of(start)]

    def first_value(self, node: fx.Node) -> fx.Node:
        """The first value of a node that may return several: an item of it, or the node itself."""
        items = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        return items[0] if items else node

    def puts_keys_into_order(self, start: fx.Node) -> bool:
        """Whether an ``input_dist_start`` reorders keys: routed ids are in order, and all keys of one rank may be."""
        collection = self.collection(start)
        return not self.of_kind("bucketize") and collection.sent_keys != collection.keys

    def hashing(self, collection: str) -> list[fx.Node]:
        """The nodes that hash the ids of a collection: several if a user's operator takes the ids of some tables."""
        nodes = self.of_kind("hash_ids", "hash_lookup")
        return [node for node in nodes if node.kwargs["collection"] == collection]

    def stored(self, lookup: fx.Node) -> tuple[TableSpec, ...]:
        """The tables of a ``lookup`` or ``hash_lookup``, with the dtypes in which a file stores their rows."""
        tables, dtypes = self.tables(lookup), lookup.kwargs.get("stored")
        if not isinstance(dtypes, tuple):
            return tables
        return tuple(replace(table, dtype=dtype) for table, dtype in zip(tables, dtypes, strict=True))

    def served(self, lookup: fx.Node) -> Served:
        """Which backend serves a ``lookup`` or ``hash_lookup``; see ``Targets.serve`` for errors."""
        tables, collection = self.stored(lookup), self.collection(lookup)
        facts = tuple(collection.facts_of(table) for table in tables)
        as_data = LookupFacts(tables, str(lookup.kwargs["combine"]), collection.is_weighted, facts)
        return self.context.targets.serve(as_data, collection.name)

    # Editing

    def add(self, kind: str, inputs: tuple[fx.Node, ...], collection: str, **attributes: Any) -> fx.Node:
        """A node at the insertion point of ``graph``. Attributes that are not set (False, 0, empty) are not stored."""
        keywords = {"collection": collection, **_set(attributes)}
        name = node_name(collection, kind)
        return self.graph.create_node("call_function", operator_of(kind), inputs, keywords, name=name)

    def item(self, node: fx.Node, number: int, name: str) -> fx.Node:
        name = node_name(str(node.kwargs["collection"]), name)
        return self.graph.create_node("call_function", operator.getitem, (node, number), {}, name=name)

    def change(self, node: fx.Node, **attributes: Any) -> None:
        node.kwargs = {"collection": node.kwargs["collection"], **_set({**node.kwargs, **attributes})}

    def replace_all(self, replacements: Mapping[fx.Node, fx.Node]) -> None:
        """``replace`` for several nodes: each user is rewritten once, ``keyed_tensor`` with its many inputs, too."""
        users = dict.fromkeys(user for node in replacements for user in node.users)
        for user in users.keys() - set(replacements.values()):
            user.args = fx.map_arg(user.args, lambda node: replacements.get(node, node))

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let every user of ``node`` use ``by``, except ``by`` itself."""
        node.replace_all_uses_with(by, delete_user_cb=lambda user: user is not by)

    def remove_unused(self) -> None:
        """Remove nodes whose values nothing uses, from the end on."""
        for node in reversed(list(self.graph.nodes)):
            if not node.users and node.op == "call_function":
                self.graph.erase_node(node)

    def renumber(self) -> None:
        """Give nodes names that follow from the graph alone, and not from how it was made."""
        used: dict[str, int] = {}
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            kind, name = self.kind(node), re.sub(r"_\d+$", "", node.name)
            if kind:
                name = node_name(str(node.kwargs.get("collection", "")), kind)
            number = used[name] = used.get(name, -1) + 1
            node.name = f"{name}_{number}" if number else name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OperatorGraph) and self._says() == other._says() and self.context == other.context

    def _says(self) -> list[tuple[Any, ...]]:
        return [
            (node.name, node.op, node.target, *fx.map_arg((node.args, node.kwargs), lambda source: f"%{source.name}"))
            for node in self.graph.nodes
        ]


OPERATOR_KEY = "recfx_operator"
"""Where the ``meta`` of a lowered node has the operator that it was made from."""


class Operator(NamedTuple):
    """A node of a graph that is data, together with the graph."""

    graph: OperatorGraph
    node: fx.Node

    @property
    def collection(self) -> CollectionContext:
        return self.graph.collection(self.node)


def lowered_from(node: fx.Node) -> Operator | None:
    """The operator that a node was made from, in whichever graph it is now; None if it was not made from one."""
    operator = node.meta.get(OPERATOR_KEY)
    return operator if isinstance(operator, Operator) else None


def names_in(node: fx.Node, attribute: str) -> tuple[str, ...]:
    """The names of tables that an attribute of a node holds, in order; none if it is not set."""
    names = node.kwargs.get(attribute, ())
    assert isinstance(names, tuple)  # the verifier has seen to it
    return names


def attributes_in(node: fx.Node) -> dict[str, Any]:
    """The attributes of a node that are set, by name, without its collection."""
    return {name: value for name, value in node.kwargs.items() if name != "collection"}


def hop_of(start: fx.Node) -> int:
    """The number of the hop of an ``output_dist_start``, from 0."""
    hop = start.kwargs.get("hop", 0)
    assert isinstance(hop, int)
    return hop


def _set(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name != "collection" and value}


def source_of(node: fx.Node) -> fx.Node:
    """The operator that gives a node's first input, or an item of it."""
    source = node.all_input_nodes[0]
    return source.all_input_nodes[0] if source.target is operator.getitem else source
