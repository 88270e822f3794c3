"""lower_to_script: the nodes that are left call modules that TorchScript compiles, or that torch.export traces."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx, nn

from recfx.ir.meta import node_meta
from recfx.ir.typed_access import find_module
from recfx.nodes import AssembleKeyedTensor, MeanDivide, SelectFeatures
from recfx.passes.base import PassResult
from recfx.serving import SCRIPT, AssembleColumns, DivideMeans, ServedNode, ServingTarget


@dataclass(frozen=True)
class LowerToScript:
    """Replace the modules of ``select_features``, ``mean_divide`` and ``keyed_tensor``.

    Args:
        target: says which module selects features.
    """

    target: ServingTarget = SCRIPT
    name: str = "lower_to_script"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        modified = False
        for node in graph_module.graph.nodes:
            served = None if node_meta(node) is None else _served(find_module(graph_module, node), self.target)
            if served is None:
                continue
            served.label = node.name
            graph_module.add_submodule(str(node.target), served)
            if isinstance(served, AssembleColumns):
                node.args = ([*node.args],)  # TorchScript has no variable number of arguments
            modified = True
        return PassResult(graph_module, modified)


def _served(module: nn.Module | None, target: ServingTarget) -> ServedNode | None:
    if isinstance(module, SelectFeatures):
        return target.select(module.collection, module.tables, module.is_weighted)
    if isinstance(module, MeanDivide):
        return DivideMeans(module.tables, module.divided, module.features)
    if isinstance(module, AssembleKeyedTensor):
        return AssembleColumns(module.keys, module.dims, module.parts)
    return None
