"""Exports a model from a device other than the CPU: the file is made and compared on the host.

The model runs once on its device, which gives the answer that the file is compared with. Tables are copied from it in
pieces, like those of sharded models; everything else is small.
"""

from __future__ import annotations

import torch
from torch import nn

from recfx.collections.collection import unsharded_collections
from recfx.collections.object_kinds import own_modules
from recfx.discovery.sample import Sample
from recfx.exporter.arguments import signature_of
from recfx.exporter.model_copies import detach_parameters
from recfx.exporter.served_collection import local_tables
from recfx.exporter.sharded_export import Sources
from recfx.exporter.stand_ins import with_stand_ins


def device_of(model: nn.Module) -> torch.device:
    """Where the tables of a converted model are."""
    for collection in unsharded_collections(model).values():
        for parameter in collection.parameters():
            return parameter.device
    return torch.device("cpu")


def on_host(model: nn.Module, call: Sample) -> tuple[nn.Module, Sample, Sources]:
    """A model on the host with small collections, the call there, and where the tables come from.

    Args:
        model: converted and not sharded; it does not change.
        call: one call of it.
    """
    collections = unsharded_collections(model)
    small = with_stand_ins(model, collections)
    detach_parameters(own_modules(small))  # because `to` writes into parameters
    return small.to("cpu"), _moved(model, call), {path: local_tables(each) for path, each in collections.items()}


def _moved(model: nn.Module, call: Sample) -> Sample:
    signature = signature_of(model, call)
    return signature.call_of(leaf.to(torch.device("cpu")) for leaf in signature.flatten(call.args, call.kwargs))
