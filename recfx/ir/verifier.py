"""The graph verifier: it runs after every pass, and names the pass and the node if something is wrong."""

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import fx

from recfx.ir.node_kinds import ASSEMBLERS, COMBINES, NODE_KINDS, NOT_COMBINED, UNPOOLED_FORMS, NodeKind, ValueType
from recfx.ir.operator_graph import OperatorGraph, hop_of, names_in
from recfx.ir.operators import kind_of
from recfx.ir.tables import columns_of, embedding_dims


class GraphVerificationError(AssertionError):
    """A pass left a malformed graph. This is a bug in recfx or in a user's pass, never in the user's model."""


Fail = Callable[[fx.Node, str], NoReturn]


def verify_graph(graph: OperatorGraph, after: str) -> None:
    """Check that a graph is well formed: nodes and attributes fit the declarations of their kinds, tables are looked up
    once, and ids and columns arrive where they belong. ``after`` is the name of the pass that has just left it.

    Raises:
        GraphVerificationError: it names the pass, the node and the rule that it breaks.
    """

    def fail(node: fx.Node, rule: str) -> NoReturn:
        raise GraphVerificationError(f"after pass {after}: node {node.name}: {rule}")

    try:
        graph.graph.lint()
    except Exception as error:
        raise GraphVerificationError(f"after pass {after}: {error}") from error
    for op, name in (("placeholder", "inputs"), ("output", "outputs")):
        count = sum(node.op == op for node in graph.graph.nodes)
        if count != 1:
            raise GraphVerificationError(f"after pass {after}: the graph has {count} {name}, not one")
    for node in graph.graph.nodes:
        kind = kind_of(node)
        if kind is None:
            _check_other(graph, node, fail)
            continue
        if not node.users:
            fail(node, f"nothing uses this {kind.name}")
        _check_attributes(graph, node, kind, fail)
        if not all(isinstance(argument, fx.Node) for argument in node.args):
            fail(node, "its inputs must be nodes, one by one; what else it needs are attributes")
        if kind.like_input and not node.args:
            fail(node, f"a {kind.name} is like its first input, but has none")
        _check_inputs(graph, node, kind, fail)
    _check_once(graph, fail)
    for check, kinds in _CHECKS.items():
        for node in graph.of_kind(*kinds):
            check(graph, node, fail)


def _check_inputs(graph: OperatorGraph, node: fx.Node, kind: NodeKind, fail: Fail) -> None:
    """Check that each input has a type that the kind declares at its position, and that none is missing."""
    inputs = [(source, _type_of(graph, source, fail)) for source in node.args if isinstance(source, fx.Node)]
    position = 0
    for declared in kind.inputs:
        begin = position
        while position < len(inputs) and (declared.repeats or position == begin):
            if inputs[position][1] not in (*declared.types, None):
                break
            position += 1
        if position == begin and not (declared.repeats or declared.optional):
            names = " or ".join(accepted.text for accepted in declared.types)
            if position == len(inputs):
                fail(node, f"a {kind.name} needs {names} as input {position}, but has none")
            _refuse(node, kind, *inputs[position], fail, f"; input {position} is {names}")
    if position < len(inputs):
        _refuse(node, kind, *inputs[position], fail)


def _refuse(
    node: fx.Node, kind: NodeKind, source: fx.Node, value_type: ValueType | None, fail: Fail, hint: str = ""
) -> NoReturn:
    description = "a value that recfx does not know" if value_type is None else value_type.text
    fail(node, f"a {kind.name} cannot be fed by {source.name}, {description}{hint}")


def _type_of(graph: OperatorGraph, value: fx.Node, fail: Fail) -> ValueType | None:
    """The type of a value, by the declaration of the kind that produces it; None for values of foreign nodes."""
    if value.op == "placeholder":
        return ValueType.BATCH
    item: Any = None
    giver = value
    if value.target is operator.getitem:
        (giver,), item = value.all_input_nodes, value.args[1]
    kind = kind_of(giver)
    if kind is None:
        return None
    if item is None and len(kind.outputs) > 1 and not kind.first_alone:
        fail(value, f"a {kind.name} returns {len(kind.outputs)} values: use one of its items")
    if item is not None and (len(kind.outputs) == 1 or item not in range(len(kind.outputs))):
        fail(value, f"a {kind.name} has no item {item}")
    if kind.like_input:
        return _type_of(graph, giver.all_input_nodes[0], fail)
    declared = kind.outputs[item or 0]
    return declared if _is_pooled(graph, giver) else UNPOOLED_FORMS.get(declared, declared)


def _is_pooled(graph: OperatorGraph, giver: fx.Node) -> bool:
    """Whether the rows that a node gives are pooled: as it says itself, or else as its collection is."""
    combine = giver.kwargs.get("combine")
    return combine != NOT_COMBINED if combine else graph.collection(giver).is_pooled


def _check_once(graph: OperatorGraph, fail: Fail) -> None:
    """Check that every table is looked up once per call of the collection, and hashed once."""
    seen: dict[tuple[str, str, str], str] = {}
    for node in graph.operators:
        for done in NODE_KINDS[graph.kind(node)].once:
            call = _call_of(node) if done == "lookup" else str(node.all_input_nodes[0].name)
            for table in graph.tables(node):
                key = (done, call, table.name)
                if key in seen:
                    fail(node, f"table {table.name!r} already has a {done}, {seen[key]}")
                seen[key] = node.name


def _call_of(lookup: fx.Node) -> str:
    """The output that a lookup leads to, which tells several calls of a shared collection apart."""
    users = list(lookup.users)
    while users:
        kind = kind_of(users[0])
        if kind is None or kind.name in ASSEMBLERS:
            return str(users[0].name)
        users = list(users[0].users)
    return ""


_SINGLE = (bool, int, float, str, torch.dtype)
_OF_TABLES = ("tables", "hashed", "divided", "deduped")
"""The attributes that hold names of tables, which may be objects of a user's subclass of ``str``."""


def _check_other(graph: OperatorGraph, node: fx.Node, fail: Fail) -> None:
    """Check a node that calls no operator: it is the input, the output, or one of the values of an operator."""
    if node.op == "output":
        (result,) = node.args
        (collection,) = graph.context.collections.values()
        (expected,) = NODE_KINDS[collection.assembled_by].outputs
        is_leaf = isinstance(result, fx.Node) and graph.kind(result) == "collection"
        if not isinstance(result, fx.Node) or not (is_leaf or _type_of(graph, result, fail) is expected):
            fail(node, f"the graph must return {expected.text}, not {result}")
    elif node.op != "placeholder" and not (
        node.target is operator.getitem and isinstance(node.args[0], fx.Node) and kind_of(node.args[0])
    ):
        called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
        fail(node, f"{called} is no operator; recfx.add_operator declares one")


def _check_routes(graph: OperatorGraph, started: fx.Node, fail: Fail) -> None:
    """Check that ids are sent by their rows if rows are cut: a shard has only some of the rows of its table."""
    sharding = graph.collection(started).sharding
    if sharding is None:
        fail(started, "its collection is not sharded")
    if sharding.cuts_rows and _type_of(graph, started.all_input_nodes[0], fail) is not ValueType.ROUTED_IDS:
        fail(started, "rows are cut, so its ids must come from a bucketize")


def _check_way_back(graph: OperatorGraph, started: fx.Node, fail: Fail) -> None:
    """Check that an ``output_dist_start`` sends the columns of the shards that travel its way, each of them once."""
    collection, way, hop = graph.collection(started), str(started.kwargs["way"]), hop_of(started)
    sharding = collection.sharding
    assert sharding is not None  # its attributes have been checked
    back = collection.way(way)
    mine = [shard.spec for shard in sharding.local() if sharding.named(shard.table.name).way_back == back]
    expected = collection.hops(way)[hop].columns if hop else columns_of(tuple(mine))
    missing = Counter((part.key, part.first, part.dim) for part in expected)
    for node in started.args[:-1]:
        assert isinstance(node, fx.Node)
        if _is_pooled(graph, node) != collection.is_pooled:
            fail(started, f"{node.name} gives rows that are {'not ' if collection.is_pooled else ''}pooled")
        missing.subtract((part.key, part.first, part.dim) for part in graph.columns(node))
    for (key, first, dim), count in missing.items():
        if count:
            much = "few" if count > 0 else "many"
            fail(started, f"it sends columns {first} to {first + dim - 1} of {key!r} by {way!r} too {much} times")


def _check_columns(graph: OperatorGraph, output: fx.Node, fail: Fail) -> None:
    """Check that a collection's output takes all of its columns, each of them once."""
    collection, missing = graph.collection(output), Counter[str]()
    missing.update(dict(zip(collection.keys, embedding_dims(collection.tables), strict=True)))
    for node in output.args if graph.kind(output) == "keyed_tensor" else output.args[:-1]:  # ids come last
        assert isinstance(node, fx.Node)
        for columns in graph.columns(node):
            missing[columns.key] -= columns.dim
    for key, count in missing.items():
        if count:
            fail(output, f"it takes {abs(count)} columns of {key!r} too {'few' if count > 0 else 'many'}")


def _check_expanded(graph: OperatorGraph, dedup: fx.Node, fail: Fail) -> None:
    """Check that the rows of different ids become those of all ids, by what the node that left ids out says of them."""
    collection, deduped = graph.collection(dedup), set(names_in(dedup, "deduped"))
    if collection.is_pooled:
        fail(dedup, "its collection pools the rows of all ids")
    for output in graph.of_kind(collection.assembled_by):
        for part in output.all_input_nodes[:-1]:
            if not deduped & {table.name for table in graph.tables(part)}:
                continue
            way, node = [part], part
            while graph.kind(node) != "output_dist_wait" and node.all_input_nodes:
                node = node.all_input_nodes[0]
                way.append(node)
            inverses = [node.all_input_nodes[1] for node in way if graph.kind(node) == "expand_rows"]
            if len(inverses) != 1 or inverses[0].all_input_nodes != [dedup]:
                fail(output, f"{part.name} must be the rows of all ids, which one expand_rows makes by {dedup.name}")


def _check_attributes(graph: OperatorGraph, node: fx.Node, kind: NodeKind, fail: Fail) -> None:
    """Check that a node's attributes are declared, are plain values, and name what its collection has."""
    values: dict[str, Any] = dict(node.kwargs)
    collection = graph.context.collections.get(values.pop("collection", None))
    if collection is None:
        fail(node, f"the graph is about no collection {node.kwargs.get('collection')!r}")
    for name, value in values.items():
        expected_type = kind.attributes.get(name)
        if expected_type is None:
            fail(node, f"a {kind.name} has no attribute {name!r}")
        if not isinstance(value, expected_type) or not all(
            type(item) in _SINGLE or (name in _OF_TABLES and isinstance(item, str))
            for item in (value if isinstance(value, tuple) else (value,))
        ):
            fail(node, f"its {name} is {value!r}, not a {expected_type.__name__} of plain values")
    named = [name for name in _OF_TABLES if name in values]
    tables = collection.by_name(graph.works_on_shards(node)) if named else {}
    for name in named:
        missing = [table for table in values[name] if table not in tables]
        if missing:
            fail(node, f"its {name} has {missing[0]!r}, which is none of its collection's here")
        if name == "hashed" and not all(tables[table].has_index for table in values[name]):
            fail(node, f"its hashed has a table without an index: {values[name]}")
    if "tables" in kind.attributes and not values.get("tables"):
        fail(node, f"a {kind.name} needs tables")
    if "lookup" in kind.once:
        stored = values.get("stored", ())
        if stored and [type(dtype) for dtype in stored] != [torch.dtype] * len(values["tables"]):
            fail(node, f"its stored is {stored!r}, not one dtype per table: {values['tables']}")
        combine, dims = values.get("combine"), {tables[table].embedding_dim for table in values["tables"]}
        if combine not in COMBINES:
            fail(node, f"its combine is {combine!r}, none of {COMBINES}")
        if combine == NOT_COMBINED and len(dims) > 1:
            fail(node, f"its tables have {sorted(dims)} columns, but rows that are not combined need the same number")
    if "way" in kind.attributes:
        ways = {} if collection.sharding is None else {way.name: way for way in collection.sharding.ways_back}
        way, hop = values.get("way", ""), values.get("hop", 0)
        if way not in ways:
            fail(node, f"{way!r} is no way back of the collection")
        if not 0 <= hop < len(ways[way].steps):
            fail(node, f"way back {way!r} has no hop {hop}")


_CHECKS: dict[Callable[[OperatorGraph, fx.Node, Fail], None], tuple[str, ...]] = {
    _check_routes: ("input_dist_start",),
    _check_way_back: ("output_dist_start",),
    _check_columns: ASSEMBLERS,
    _check_expanded: ("dedup_ids",),
}
"""Where ids and columns have to arrive, by the kinds of nodes that say so."""
