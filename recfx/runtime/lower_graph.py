"""Makes what runs from a graph of operators: the same nodes, each of which calls a module.

This is the one place where a graph meets tables, process groups and kernels.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn

from recfx.errors import ConversionError, type_of
from recfx.ir.meta import NodeMeta, annotate
from recfx.ir.operator_graph import OPERATOR_KEY, Operator, OperatorGraph, names_in
from recfx.runtime.assemble import AssembleJaggedDict, AssembleKeyedTensor, MeanDivide
from recfx.runtime.base import NodeModule, TracedNode
from recfx.runtime.dedup_ids import DedupIds, ExpandRows
from recfx.runtime.find_rows import FindRows
from recfx.runtime.hash_ids import HashIds, HashLookup
from recfx.runtime.input_dist import Bucketize, InputDistStart, InputDistWait
from recfx.runtime.lookup import Lookup
from recfx.runtime.lowered import Lowered, Runtime
from recfx.runtime.output_dist import AllToAll, CrossHost, OutputDistStart, OutputDistWait, OwnBatch, ReduceScatter
from recfx.runtime.rows_dist import OwnRows, RowsAllToAll
from recfx.runtime.select_features import SelectFeatures
from recfx.runtime.transfers import ToDevice, ToHost


class OwnNode(TracedNode):
    """Runs the user's module as a node. Graphs are made again at any time, so it must hold no parameters or buffers."""

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        collection, kind = of.collection.name, of.graph.kind(of.node)
        if kind not in OWN_MAKERS:
            raise ConversionError(
                f"no module runs {of.node.name}, because nothing lowers nodes of kind {kind!r}.",
                reason="not_lowered",
                module_path=collection,
                what_to_do="let the passes of recfx.passes() run as well; or call recfx.add_operator with make=.",
            )
        module = OWN_MAKERS[kind](of)
        if not isinstance(module, nn.Module):
            raise ConversionError(
                f"the function that makes what runs for {kind!r} returned {type_of(module)}.",
                reason="not_lowered",
                module_path=collection,
                what_to_do="return an nn.Module from make=, whose forward takes the inputs of the node.",
            )
        state = next(itertools.chain(module.named_parameters(), module.named_buffers()), None)
        if state is not None:
            raise ConversionError(
                f"the module of {kind!r} has a parameter or buffer {state[0]!r}, but graphs are no state: they are "
                "made again when an optimizer is attached, and checkpoints do not have them.",
                reason="operator_with_state",
                module_path=collection,
                what_to_do="keep what is learned in the model itself, and let the operator do without.",
            )
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def lower_graph(
    graph: OperatorGraph,
    metas: Mapping[str, NodeMeta],
    make: Callable[[Lowered], nn.Module],
    runtime: Runtime | None = None,
    backend: str = "auto",
) -> fx.GraphModule:
    """Lower the graph of one collection, after the last rewrite: nodes keep their names, order and metadata, and
    ``make`` (``module_of``, for models) makes the module of each that ``runtime`` does not have already. A ``backend``
    other than ``"auto"`` is the one that every lookup must use.
    """
    root, lowered, new_nodes = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node]()
    numbers: dict[str, int] = {}
    for node in graph.graph.nodes:
        if node.name not in metas:
            new_nodes[node] = lowered.node_copy(node, new_nodes.__getitem__)
            continue
        kind = graph.kind(node)
        number = numbers[kind] = numbers.get(kind, -1) + 1
        target = f"{kind}_{number}" if number else kind
        module = None if runtime is None else runtime.module(node.name)
        if module is None:
            module = make(Lowered(graph, node, graph.collection(node), runtime, backend))
            if hasattr(module, "label"):
                module.label = node.name
            if runtime is not None:
                runtime.add(node.name, kind, module)
        root.add_module(target, module)
        inputs = fx.map_arg(node.args, new_nodes.__getitem__)
        new_nodes[node] = lowered.create_node("call_module", target, inputs, {}, name=node.name)
        annotate(new_nodes[node], metas[node.name])
        new_nodes[node].meta[OPERATOR_KEY] = Operator(graph, node)
    graph_module = fx.GraphModule(root, lowered)
    graph_module.meta["recfx_numbers"] = numbers
    return graph_module


def module_of(of: Lowered) -> NodeModule:
    """What runs for a node in a model; errors as for ``lower_graph``."""
    return MAKERS.get(of.graph.kind(of.node), OwnNode)(of)


# What may be given a batch whose check is not waited for. Only one rank sends none on that others would wait for.
_TAKE_MASKED = {
    *("select_features", "input_dist_start", "input_dist_wait", "to_host", "hash_ids", "find_rows", "to_device"),
    *("lookup", "output_dist_start", "output_dist_wait", "mean_divide", "keyed_tensor"),
}


def _select_features(of: Lowered) -> SelectFeatures:
    collection, sharding = of.collection, of.collection.sharding
    module = SelectFeatures(collection.name, collection.tables, collection.is_weighted)
    if of.runtime_or_none is not None:
        module.store, module.made_for = of.runtime.store, of.runtime.store.graphs
    kinds = set(map(of.graph.kind, of.graph.operators))
    if sharding is not None:
        copies = any(of.graph.kind(user) == "to_host" and user.kwargs.get("with_bags") for user in of.node.users)
        module.prepare_to_send(sharding.world_size, collection.ids_on_host and not copies, sharding.cuts_rows)
    alone = sharding is None or sharding.world_size == 1
    module.may_mask, module.gives_rows = alone and kinds <= _TAKE_MASKED, "hash_ids" in kinds
    return module


def _mean_divide(of: Lowered) -> MeanDivide:
    divided, keys = names_in(of.node, "divided"), of.collection.keys
    return MeanDivide(of.graph.tables(of.node), divided, keys, of.graph.columns(of.node))


STARTS: dict[str, type[OutputDistStart]] = {
    start.operation: start for start in (AllToAll, ReduceScatter, CrossHost, OwnBatch, RowsAllToAll, OwnRows)
}
"""The modules of ``output_dist_start``, by operation."""

MAKERS: dict[str, Callable[[Lowered], NodeModule]] = {
    "select_features": _select_features,
    "dedup_ids": DedupIds,
    "bucketize": Bucketize,
    "input_dist_start": InputDistStart,
    "input_dist_wait": InputDistWait,
    "to_host": ToHost,
    "hash_ids": HashIds,
    "find_rows": FindRows,
    "to_device": ToDevice,
    "lookup": Lookup,
    "hash_lookup": HashLookup,
    "output_dist_start": lambda of: STARTS[of.graph.hop(of.node).operation](of),
    "output_dist_wait": lambda of: OutputDistWait(),
    "expand_rows": ExpandRows,
    "mean_divide": _mean_divide,
    "keyed_tensor": AssembleKeyedTensor,
    "jagged_dict": AssembleJaggedDict,
}
"""What makes the module of each kind of node. A new kind is one line."""

OWN_MAKERS: dict[str, Callable[[Lowered], nn.Module]] = {}
"""What makes the module of each operator that the user has declared with ``recfx.add_operator``."""
