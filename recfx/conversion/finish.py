"""The last steps of ``convert``: making one graph of the result, or putting the result into the user's model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.copy_modules import replace_in_place
from recfx.collections.sharding.collection import leave_to_collections, sharded_collections
from recfx.collections.whole_graph import WholeGraph
from recfx.conversion.whole_graph import make_whole_graph
from recfx.discovery.classify import Finding
from recfx.discovery.conversion_record import attach_conversion, conversion_of
from recfx.discovery.sample import Sample
from recfx.discovery.wrappers import unwrap
from recfx.optim.keyed_optimizer import attach_fused_optimizer
from recfx.replacement.replace_collections import carry_references


def as_whole_graph(converted: nn.Module, call: Sample | None) -> nn.Module:
    """The converted model as a train and an eval graph over its modules."""
    assert call is not None
    if isinstance(converted, (WholeGraph, ConvertedCollection)):
        return converted  # a collection is a graph already
    graph = make_whole_graph(unwrap(converted), call)
    leave_to_collections(graph)
    if sharded_collections(graph):
        attach_fused_optimizer(graph)
    return graph


def patch(
    model: nn.Module, converted: nn.Module, replacements: Mapping[int, nn.Module], findings: list[Finding]
) -> nn.Module:
    """Put the replacements into ``model``, and return it; a model that is a collection itself is not patched."""
    if id(model) in replacements:
        return converted
    for finding in findings:
        if id(finding.module) in replacements:  # its hooks and attributes refer to the modules of the copy
            carry_references(finding.module, replacements[id(finding.module)])
    replace_in_place(model, replacements)
    attach_conversion(model, conversion_of(converted))
    return model
