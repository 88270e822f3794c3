"""``recfx.trace``: read the whole model as one graph."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from recfx.argument_types import typed
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.whole_graph import WholeGraph, check_modes
from recfx.collections.wrappers import unwrap
from recfx.conversion.convert import convert
from recfx.conversion.whole_graph import build_whole_graph, sample_failed
from recfx.discovery.sample import Sample
from recfx.errors import ConversionError
from recfx.replacement.conversion_record import attach_conversion, conversion_of


@typed(ConversionError)
def trace(model: nn.Module, sample: Any) -> fx.GraphModule:
    """The whole-model graph of the mode that ``model`` is in, with every collection as explicit nodes.

    A model that is not converted yet is not changed: a copy of it is converted, as ``convert`` does by default. Each
    module that holds no collection is one call; so is each module that cannot be traced
    (``graph_module.meta["recfx_rollbacks"]`` says why). The graph can be run: it agrees with the Python model at two
    batch sizes, and shares its modules. With sharded collections that comparison communicates: every rank calls
    ``trace``, each with its own sample. It stays the graph of that mode: its ``train()`` and ``eval()`` set that of the
    modules that it calls, as for any graph of torch.fx; ``convert(whole_graph=True)`` has a graph for each mode.

    Example:
        >>> graph_module = recfx.trace(Model(), sample)
        >>> [node.name for node in graph_module.graph.nodes]
        ['features', 'ebc_select_features', 'ebc_lookup', 'ebc_keyed_tensor', 'getitem', 'over', 'output']

    Args:
        model: any model with standard or converted collections.
        sample: one call of it, as for ``convert``.

    Raises:
        ConversionError: ``untraceable_root``, ``whole_graph_differs``, ``mixed_modes``,
            ``sample_failed``, or what ``convert`` refuses.
    """
    call = Sample.of(sample)
    if isinstance(model, WholeGraph):
        return model.graph_module
    converted = unwrap(convert(model, call, verify=False, on_unsupported="keep"))
    if isinstance(converted, ConvertedCollection):
        return converted.graph_module
    traced = build_whole_graph(converted, call, converted.training)
    if traced.not_compared is not None:
        raise sample_failed(traced.not_compared) from traced.not_compared
    check_modes(converted, converted.training, traced.entered)
    traced.graph_module.meta["recfx_rollbacks"] = traced.rollbacks
    attach_conversion(traced.graph_module, conversion_of(converted))
    return traced.graph_module
