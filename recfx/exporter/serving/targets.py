"""The registry of what files consist of: which module serves each node, by the kind of program that a file holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx, nn

from recfx.errors import Diagnostic, ExportError
from recfx.exporter.serving.assemble import AssembleColumns, AssembleJagged, DivideMeans
from recfx.exporter.serving.aten import AtenFindRows, AtenPoolRows, AtenSelectBags
from recfx.exporter.serving.find_rows import FindFrozenRows
from recfx.exporter.serving.pool_rows import FindAndPool, PoolRows
from recfx.exporter.serving.select_bags import SelectBags
from recfx.exporter.serving.traced import TracedFindRows, TracedSelectBags
from recfx.exporter.serving.triton import DEVICE_TYPES, TritonPoolRows
from recfx.ir.context import LookupFacts, Served
from recfx.ir.node_kinds import NODE_KINDS, ValueType
from recfx.ir.tables import embedding_dims
from recfx.passes.base import Rewriting
from recfx.runtime.lower_graph import OwnNode, lower_graph
from recfx.runtime.lowered import Lowered


@dataclass(frozen=True)
class ServingTarget:
    """The modules of one kind of program; what is not named here is the same in all of them. To passes it is what the
    kernel targets of a machine are for models: it has the methods of ``Targets``.
    """

    name: str
    format: str = "torchscript"  # of its files, as for ``export``
    is_portable: bool = True  # whether its files use only operators of torch and FBGEMM
    device_types: tuple[str, ...] = ("cpu",)  # that its files are made for; () for any, the CPU included
    select: type[SelectBags] = SelectBags  # serves ``select_features``
    find: type[FindFrozenRows] = FindFrozenRows  # serves ``find_rows``
    pools: tuple[type[PoolRows], ...] = (PoolRows,)  # serve ``lookup``: the first that does not decline
    fused: type[FindAndPool] | None = None  # serves ``find_rows`` and ``lookup`` together, if anything does
    counts_probes: bool = False  # whether it has to know the longest probe of each index

    def serve(self, lookup: LookupFacts, collection: str) -> Served:
        if self.fused is not None:
            return Served(self.fused.kernel)
        declined: list[Diagnostic] = []
        for pool in self.pools:
            refusal = pool.declines(lookup)
            if refusal is None:
                break
            declined.append(refusal)
        message = f"files of target {self.name!r} have no operator that finds ids and pools their rows."
        return Served(pool.kernel, tuple(declined), Diagnostic("no_finding_kernel", "", message, by=self.name))

    def may_name(self, backend: str) -> bool:
        return backend in {module.kernel for module in (self.pools if self.fused is None else (self.fused,))}

    def find_rows(self, device: str) -> Served:
        return Served(self.name)

    def index_operators(self, device: str) -> str:
        return ""  # nothing is inserted into an index of a file


SCRIPT = ServingTarget("torchscript")
"""TorchScript on the CPU, with FBGEMM's operators."""

TRACED = ServingTarget("pt2", "pt2", select=TracedSelectBags, find=TracedFindRows)
"""``torch.export`` on the CPU, with FBGEMM's operators."""

NATIVE = ServingTarget("torchscript with recfx's operators", is_portable=False, fused=FindAndPool)
"""TorchScript on the CPU, with recfx's C++ operators."""

ATEN = ServingTarget(
    "aten", device_types=(), select=AtenSelectBags, find=AtenFindRows, pools=(AtenPoolRows,), counts_probes=True
)
"""TorchScript on any device, without FBGEMM's operators."""

TRITON = replace(
    ATEN,
    name="aten with recfx's kernels",
    is_portable=False,
    device_types=DEVICE_TYPES,
    pools=(TritonPoolRows, AtenPoolRows),
)
"""``ATEN``, but where recfx has a kernel in Triton for a lookup, its operator, which Python registers."""

FOR_DEVICES = (ATEN, TRITON)
"""The targets whose files run on any device."""

SERVING_TARGETS = (SCRIPT, TRACED, NATIVE, *FOR_DEVICES)


def target_of(format: str, portable: bool, device_type: str) -> ServingTarget | None:
    """The target of the files that ``export`` is asked for; None if there are no such files."""
    for target in SERVING_TARGETS:
        is_for_device = device_type in target.device_types or (not target.device_types and device_type != "cpu")
        if (target.format, target.is_portable) == (format, portable) and is_for_device:
            return target
    return None


def lower_served(made: Rewriting, target: ServingTarget) -> fx.GraphModule:
    """Lower the graph of one collection for a file: the same nodes, which call modules that torch can compile."""
    graph_module = lower_graph(made.graph, made.metas, lambda of: _module(of, target))
    for node in graph_module.graph.nodes:
        module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, AssembleColumns):  # TorchScript has no variable number of arguments
            node.args = ([*node.args],)
        elif isinstance(module, AssembleJagged):
            node.args = ([*node.args[:-1]], node.args[-1])
    graph_module.recompile()
    return graph_module


def _module(of: Lowered, target: ServingTarget) -> nn.Module:
    """The module of one node. Ids and rows are other objects in files than in models."""
    collection, kind = of.collection, of.graph.kind(of.node)
    indexes = {name: facts.index for name, facts in collection.facts.items() if facts.index is not None}
    if kind == "select_features":
        return target.select(collection.name, collection.tables, collection.is_weighted)
    if kind == "find_rows":
        return target.find(collection.tables, indexes)
    if kind in ("lookup", "hash_lookup"):
        pooled = (of.graph.stored(of.node), of.attributes["combine"], tuple(collection.keys), collection.is_weighted)
        if kind == "lookup":
            return {pool.kernel: pool for pool in target.pools}[of.attributes["kernel"]](*pooled)
        assert target.fused is not None
        return target.fused(*pooled, {name: indexes[name] for name in of.attributes.get("hashed", ())})
    if kind == "mean_divide":
        return DivideMeans(of.graph.tables(of.node), of.attributes["divided"], tuple(collection.keys))
    if kind == "keyed_tensor":
        parts = [of.graph.columns(node) for node in of.node.all_input_nodes]
        return AssembleColumns(list(collection.keys), embedding_dims(collection.tables), parts)
    if kind == "jagged_dict":
        keys = [[columns.key for columns in of.graph.columns(node)] for node in of.node.all_input_nodes[:-1]]
        return AssembleJagged(list(collection.keys), keys, collection.need_indices)
    taken = {value_type for declared in NODE_KINDS[kind].inputs for value_type in declared.types}
    if refused := taken - {ValueType.POOLED, ValueType.ARRIVED_POOLED, ValueType.DIVIDED}:
        raise ExportError(
            f"operator {kind!r} takes {min(value_type.value for value_type in refused)}, and files have operators "
            "of the user's for pooled rows alone.",
            reason="operator_not_exported",
            module_path=collection.name,
            what_to_do="convert the model without the pass that adds it, load the state, and export that.",
        )
    return OwnNode(of).module
