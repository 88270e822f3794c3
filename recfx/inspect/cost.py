"""``recfx.cost``: what each node of a model, or of a graph, costs per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from recfx.errors import ConversionError
from recfx.modules.converted_collection import ConvertedCollection
from recfx.modules.whole_graph import WholeGraph
from recfx.nodes import InputDistStart
from recfx.planner.placements import PRIVATE
from recfx.pricing.cost import Cost
from recfx.pricing.cost_data import COST_VERSION, features_of
from recfx.pricing.graph_nodes import GraphReader, graphs_of
from recfx.pricing.hardware import ASCEND_910B, H100, Hardware
from recfx.pricing.planned_model import planned_as_sharded
from recfx.pricing.this_machine import this_machine
from recfx.pricing.work import NodeCost
from recfx.record.wrappers import unwrap


def cost(model_or_graph: nn.Module, topology: Any = None) -> Cost:
    """What each node costs per step: bytes read, written, sent and kept, and flops, as expressions.

    The expressions are in ``B`` (samples per rank), ``W`` (ranks) and ``L_<feature>`` (mean number of ids per sample);
    ``.at(B=..., L=...)`` gives numbers, and predicts times. A model in training mode is priced with its backward. What
    recfx did not make is one node, of which only the linear layers count as work.

    Args:
        model_or_graph: a converted model, sharded (this rank's part is priced) or not; or a graph of
            ``recfx.trace``.
        topology: what times are predicted for: a :class:`recfx.pricing.hardware.Hardware`. Default: that of the
            device of the tables.

    Raises:
        ConversionError: ``invalid_argument``, ``no_collection``.
    """
    if not isinstance(model_or_graph, nn.Module):
        raise ConversionError(
            f"it is a {type(model_or_graph).__name__}, not a model or a graph.",
            reason="invalid_argument",
            what_to_do="pass a converted model, or a graph of recfx.trace.",
        )
    model = unwrap(model_or_graph)
    if isinstance(model, WholeGraph):
        model = model.graph_module
    reader = GraphReader(model.training)
    collections = list(graphs_of(model))
    if isinstance(model, fx.GraphModule):
        nodes = reader.nodes_of(model)
    else:
        nodes = _nodes_of_model(model, collections, reader)
    if not any(node.kind != "dense" for node in nodes):
        raise ConversionError(
            "there is no converted collection in it.",
            reason="no_collection",
            what_to_do="convert the model with recfx.convert first, or pass a graph of recfx.trace.",
        )
    rank, world_size = _ranks(model)
    return Cost(
        version=COST_VERSION,
        nodes=tuple(nodes),
        features=features_of(nodes),
        world_size=world_size,
        rank=rank,
        trains=model.training,
        device=_device(model),
        hardware_of=_hardware(topology, model),
        planned=tuple(planned_as_sharded(each) for each in collections if each.is_sharded),
    )


def _nodes_of_model(model: nn.Module, collections: list[ConvertedCollection], reader: GraphReader) -> list[NodeCost]:
    nodes = [node for each in collections for node in reader.nodes_of(each.graph_module, max(each.calls, 1))]
    return [*nodes, reader.dense("dense", model)] if model not in collections else nodes


def _ranks(model: nn.Module) -> tuple[int, int]:
    """This rank and the number of ranks of the collections in ``model``; 0 and 1 if none is sharded."""
    for module in model.modules():
        if isinstance(module, InputDistStart):
            return module.group.rank(), module.group.size()
    return 0, 1


def _hardware(topology: Any, model: nn.Module) -> Callable[[], Hardware]:
    if isinstance(topology, Hardware):
        return lambda: topology
    if topology is not None:
        raise ConversionError(
            f"topology is a {type(topology).__name__}.",
            reason="invalid_argument",
            what_to_do="pass one of recfx.pricing.hardware, ASCEND_910B or H100, or a Hardware of your own numbers.",
        )
    return {"cuda": lambda: H100, "npu": lambda: ASCEND_910B}.get(_device(model), this_machine)


def _device(model: nn.Module) -> str:
    found = next((each.device.type for each in model.parameters() if not each.is_meta), "cpu")
    return "npu" if found == PRIVATE else found
