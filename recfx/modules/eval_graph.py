"""The graph that a collection runs in eval mode, where it differs from the one that it trains with."""

from __future__ import annotations

from torch import fx

from recfx.ir.snapshot import PassRecord
from recfx.passes.base import PASSES_KEY, run_passes
from recfx.passes.find_on_device import FindOnDevice


def make_eval_graph(train_graph: fx.GraphModule) -> tuple[fx.GraphModule, list[PassRecord]]:
    """The graph of eval mode, and what the passes did that made it.

    Args:
        train_graph: the collection's graph, after the last pass.

    Returns:
        The graph, which is ``train_graph`` itself if the modes do not differ. Otherwise the two share their modules,
        and either has all of them, under the same names: graphs of whole models name modules of either.
    """
    graph = fx.Graph()
    result = graph.graph_copy(train_graph.graph, {})
    graph.output(result)
    eval_graph = fx.GraphModule(train_graph, graph)
    eval_graph.meta["recfx_numbers"] = dict(train_graph.meta["recfx_numbers"])
    eval_graph.meta[PASSES_KEY] = train_graph.meta[PASSES_KEY]
    records = run_passes(eval_graph, (FindOnDevice(),))
    if not records[-1].modified:
        return train_graph, [record for record in records if record.declined]
    for one, other in ((train_graph, eval_graph), (eval_graph, train_graph)):
        for name, module in one.named_children():
            if name not in other._modules:
                other.add_submodule(name, module)
    return eval_graph, records
