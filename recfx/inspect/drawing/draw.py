"""``recfx.draw``: a picture of a model's graphs, before and after conversion."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from recfx.discovery.discover import check_module
from recfx.errors import DrawingError
from recfx.inspect.drawing.collect import collect
from recfx.inspect.drawing.dot import render_dot, render_svg
from recfx.inspect.drawing.drawing import Drawing
from recfx.inspect.drawing.html import render_html
from recfx.inspect.drawing.planned import as_planned
from recfx.inspect.drawing.write import as_path, write_text
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.topology import NpuTopology


def draw(
    model_or_graph: nn.Module,
    path: str | os.PathLike[str],
    topology: Topology | NpuTopology | Hardware | None = None,
    *,
    plan: ShardingPlan | None = None,
    world_size: int | None = None,
) -> None:
    """Draw a model's graphs, before and after conversion, into a file.

    The model does not change, nothing runs and nothing is communicated.

    Args:
        model_or_graph: a model, converted or not, also inside DDP and torch.compile wrappers; a graph that
            ``recfx.trace`` returns, or one of ``convert(..., whole_graph=True)``, with the code around the collections;
            or the graph of one collection. Of a sharded model, each rank draws its own graphs. Without a graph of the
            whole model, each collection is drawn by itself; one that is not converted is drawn as it is.
        path: the file, which is replaced if it exists. Its ending is the format: ``.html`` is one page that needs no
            network, with every pass, what is known of each node, and a search; ``.svg`` a picture of before and after,
            which needs Graphviz or ``mini-racer``; ``.dot`` the same as Graphviz's text.
        topology: draws a model that is not sharded as rank 0 would have it if ``recfx.plan`` sharded it over the ranks
            of this topology, which need not be there: one of TorchRec's, or ``recfx.planner.topology.npu_topology``.
            Nodes and kernels are those of its devices, as if all that kernels need were installed. A page also predicts
            the time of each node. Or a :class:`recfx.planner.pricing.hardware.Hardware`, for times alone; with
            ``plan``, also for the nodes and kernels of its device.
        plan: likewise, by this plan; times are those on what it was made for, if ``recfx.plan`` made it.
        world_size: the number of ranks that ``plan`` is for. Default: those that it was made for, if
            ``recfx.plan`` made it; those of the topology; or those of a table that is on all ranks.

    Raises:
        DrawingError: ``invalid_argument``, ``unknown_ending``, ``no_collection``, ``cannot_write``; for ``.svg`` also
            ``no_graphviz``, ``graphviz_failed``; with a plan or a topology also ``already_sharded``. A file
            that was there before is as it was.
        ConversionError: ``invalid_argument``: it is not a module; with a plan or a topology, ``invalid_topology`` and
            those of ``recfx.plan`` and of sharding.
        InputError: ``invalid_argument``: ``world_size`` is no number of ranks.
    """
    check_module(model_or_graph, "model_or_graph")
    target = as_path(path)
    render = FORMATS.get(target.suffix.lower())
    if render is None:
        raise DrawingError(
            f"{target} ends in {target.suffix!r}, which is not a format."
            if target.suffix
            else f"{target} has no ending.",
            reason="unknown_ending",
            what_to_do=f"end the path in one of {', '.join(FORMATS)}.",
        )
    if plan is None and world_size is None and (topology is None or isinstance(topology, Hardware)):
        drawing = collect(model_or_graph, topology)
    else:
        planned = as_planned(model_or_graph, topology, plan, world_size)
        drawing = collect(model_or_graph, planned.hardware, planned)
    write_text(target, render(drawing))


FORMATS: dict[str, Callable[[Drawing], str]] = {
    ".html": render_html,
    ".svg": lambda drawing: render_svg(render_dot(drawing)),
    ".dot": render_dot,
}
"""What makes the text of a file, by its ending."""
