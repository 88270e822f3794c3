"""The whole model as one graph: a shallow trace with the collections inlined, kept only if it agrees with Python."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from recfx.collections.converted_collection import ConvertedCollection, converted_collections
from recfx.collections.copy_modules import carry_hooks, copy_modules, own_modules, refuse_fully_sharded
from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.whole_graph import Traced, WholeGraph, share_children
from recfx.errors import ConversionError, Diagnostic, told_by
from recfx.ir.meta import CALL_KEY, annotate, node_meta
from recfx.models.attribute_reads import AttributeReads, plain_attribute
from recfx.models.compare_models import Difference, compare_forward
from recfx.models.conversion_record import attach_conversion, conversion_of
from recfx.models.discover import set_mode
from recfx.models.sample import Sample, without_ids
from recfx.models.shallow_tracer import Computed, ShallowTracer, UnpicklingTracer, rollback_of
from recfx.models.trace_graph import source_of, trace_graph  # fmt: skip
from recfx.runtime.base import FORWARD_HOOKS, has_forward_hooks


def inline_collections(graph_module: fx.GraphModule, training: bool) -> set[str]:
    """Replace calls of converted collections, whose paths are returned, with the nodes of their graphs. One with hooks
    stays one call; so does one whose output nothing uses, or that is called with anything but one value of the graph.
    """
    inlined = set()
    for node in list(graph_module.graph.nodes):
        if node.op != "call_module":
            continue
        collection = graph_module.get_submodule(str(node.target))
        if not isinstance(collection, ConvertedCollection):
            continue
        given = [*node.args, *node.kwargs.values()]
        takes_one_value = len(given) == 1 and isinstance(given[0], fx.Node)
        if not node.users or has_forward_hooks(collection) or not takes_one_value:
            continue
        inlined.add(str(node.target))
        inline_graph(node, collection.graph_of(training).graph, f"{node.target}.graph_module")
    graph_module.recompile()
    return inlined


def inline_graph(call: fx.Node, collection: fx.Graph, prefix: str) -> None:
    """Replace a call of a collection with the nodes of its graph, whose modules are in the module at ``prefix``."""
    (features,) = [*call.args, *call.kwargs.values()]
    (placeholder,) = collection.find_nodes(op="placeholder")
    assert isinstance(features, fx.Node)
    copies = {placeholder: features}
    with call.graph.inserting_before(call):
        output = call.graph.graph_copy(collection, copies)
    del copies[placeholder]
    source = source_of(call)
    for inner, copied in copies.items():
        copied.meta[CALL_KEY] = call.name, str(call.target)
        if inner.op == "call_module":  # not a getitem on a pair
            copied.target = f"{prefix}.{inner.target}"
        meta = node_meta(inner)
        if meta is not None and source is not None:  # the line of this call: a shared collection has several
            annotate(copied, replace(meta, source=source))
    assert isinstance(output, fx.Node)
    call.replace_all_uses_with(output)
    call.graph.erase_node(call)


def make_whole_graph(model: nn.Module, sample: Sample) -> WholeGraph:
    """Trace ``model`` in both modes, and make a module of the two graphs that keeps the model's names and record."""
    traced = {training: build_whole_graph(model, sample, training) for training in (True, False)}
    rollbacks = list(dict.fromkeys(rollback for graph in traced.values() for rollback in graph.rollbacks))
    failure = traced[model.training].not_compared
    if failure is not None and all(graph.not_compared for graph in traced.values()):
        raise sample_failed(failure) from failure
    for training, graph in traced.items():
        if graph.not_compared:
            message, what_to_do = told_by(graph.not_compared, "")
            where = f"the graph of {_name(training)} mode was not compared: {message}"
            rollbacks.append(Diagnostic("not_compared", "", where, what_to_do))
    whole = WholeGraph(model, traced)
    conversion = copy.copy(conversion_of(model))
    conversion.rollbacks = rollbacks
    attach_conversion(whole, conversion)
    return whole


def build_whole_graph(model: nn.Module, sample: Sample, training: bool) -> Traced:
    """The graph of one mode, over the modules of ``model``; if it differs from eager, with fewer modules entered."""
    refuse_fully_sharded(model, "make the graph first, and call fully_shard afterwards.")
    hookless, _ = copy_modules(model)  # the root's own hooks run around the graph, not in it
    carry_hooks(nn.Module(), hookless)
    opaque: frozenset[str] = frozenset()
    given_up: list[Diagnostic] = []
    while True:
        graph_module, rollbacks, entered, constants = _trace(model, sample, training, opaque)
        difference = None if sample.on_meta(model) else compare_forward(hookless, graph_module, sample, training)
        if not isinstance(difference, Difference):
            return Traced(graph_module, given_up + rollbacks, tuple(sorted(entered)), constants, difference)
        if entered <= opaque:
            raise ConversionError(
                f"the graph differs from the Python model in {_name(training)} mode: {difference}.",
                reason="whole_graph_differs",
                what_to_do="convert without whole_graph=True: replacing collections keeps the model's own code.",
            )
        given_up += [Diagnostic("graph_differs", path, str(difference)) for path in sorted(entered - opaque)]
        opaque |= entered


def _name(training: bool) -> str:
    return "train" if training else "eval"


def _trace(
    model: nn.Module, sample: Sample, training: bool, opaque: frozenset[str]
) -> tuple[fx.GraphModule, list[Diagnostic], set[str], dict[tuple[str, str], Any]]:
    root, _ = copy_modules(model)
    set_mode(root, training)
    collections = {id(collection) for collection in converted_collections(root).values()}
    computed, reads = Computed(root), AttributeReads(dict(root.named_modules()), plain_attribute)
    tracer = ShallowTracer(collections, opaque, computed, reads)
    # With sharded collections, ranks would have to run the calls together: nothing is known then.
    calls = [] if sharded_collections(root) else [sample, sample.resized(), without_ids(sample)]
    try:
        with _tensor_attributes_stay(root), computed, reads.recorded():
            graph = trace_graph(root, sample, tracer, observe=[call for call in calls if call is not None])
        graph._tracer_cls = UnpicklingTracer  # which a pickle names; the tracer here needs arguments
        # Names that are not identifiers can make code that does not compile.
        graph_module = fx.GraphModule(root, graph, type(model).__name__)
    except Exception as error:  # user code on proxies can raise anything; the reason is part of the error
        rollback = rollback_of("", error)
        raise ConversionError(
            f"the model's own forward cannot be traced ({rollback.message}).",
            reason="untraceable_root",
            what_to_do="change what the line does with the batch, so that it does not need its values or its size in "
            "Python; or convert without whole_graph=True: replacing collections needs no trace.",
        ) from error
    entered = set(tracer.entered)
    share_children(model, graph_module)
    inlined = inline_collections(graph_module, training)
    graph_module.graph.lint()
    graph_module.training = training  # not train(), because its children are the model's own
    graph_module.meta["recfx_training"] = training
    constants = reads.values | {(path, name): {} for path in inlined for name in FORWARD_HOOKS}
    return graph_module, tracer.rollbacks, entered, dict(sorted(constants.items()))  # module by module


@contextlib.contextmanager
def _tensor_attributes_stay(root: nn.Module) -> Iterator[None]:
    """Restore plain tensor attributes, which the graph reads: code that changes them in place does so while traced."""
    tensors = [value for module in own_modules(root) for value in module.__dict__.values() if isinstance(value, Tensor)]
    before = [(tensor, tensor.detach().clone(), tensor._version) for tensor in tensors if not tensor.is_inference()]
    try:
        yield
    finally:
        for tensor, value, version in before:
            if tensor._version != version:
                tensor.detach().copy_(value)


def sample_failed(error: Exception) -> ConversionError:
    """The model cannot be called with the sample, so there is nothing to compare a graph of it with."""
    message, what_to_do = told_by(error, "pass one call of the model that works.")
    return ConversionError(
        f"the model cannot be called with the sample: {message}", reason="sample_failed", what_to_do=what_to_do
    )
