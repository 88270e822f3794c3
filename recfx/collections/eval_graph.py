"""The graph that a collection runs in eval mode, where it differs from the one that it trains with."""

from __future__ import annotations

from torch import fx

from recfx.collections.compile_graph import compile_again
from recfx.ir.snapshot import PassRecord
from recfx.passes.base import Rewrite
from recfx.passes.find_on_device import find_on_device
from recfx.runtime.runtime import Runtime

FIND_ON_DEVICE = Rewrite("find_on_device", find_on_device)


def make_eval_graph(train_graph: fx.GraphModule, runtime: Runtime) -> tuple[fx.GraphModule, list[PassRecord]]:
    """The graph of eval mode, and what the passes did that made it.

    Args:
        train_graph: the collection's graph, after the last pass.
        runtime: what it was lowered from.

    Returns:
        The graph, which is ``train_graph`` itself if the modes do not differ. Otherwise the two share their modules,
        and either has all of them, under the same names: graphs of whole models name modules of either.
    """
    eval_graph, records = compile_again(train_graph, runtime, (FIND_ON_DEVICE,))
    if eval_graph is train_graph:
        return train_graph, [record for record in records if record.declined]
    for one, other in ((train_graph, eval_graph), (eval_graph, train_graph)):
        for name, module in one.named_children():
            if name not in other._modules:
                other.add_submodule(name, module)
    return eval_graph, list(records)
