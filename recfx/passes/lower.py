"""lower: gives each lookup the kernel that serves it, from the registry.

The choice is for the tables as they are now; a lookup whose tables move or change dtype chooses again by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from recfx.ir.meta import annotate
from recfx.ir.typed_access import find_module, meta_of, node_module
from recfx.nodes import HashLookup, Lookup
from recfx.passes._nodes import nodes_of_kind
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class Lower:
    """Choose kernels.

    Args:
        backend: ``"auto"``, or the one backend that every lookup must use.
    """

    backend: str
    name: str = "lower"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place; the diagnostics in ``declined`` name the backends that were passed over.

        Raises:
            ConversionError: the named backend cannot serve a lookup.
        """
        declined = []
        lookups = [node for kind in ("lookup", "hash_lookup") for node in nodes_of_kind(graph_module, kind)]
        for node in lookups:
            module = find_module(graph_module, node)
            module = module.lookup if isinstance(module, HashLookup) else node_module(graph_module, node, Lookup)
            module.backend = self.backend
            choice = module.choose_kernel()
            declined += [replace(refusal, path=module.collection, node=node.name) for refusal in choice.declined]
            annotate(node, replace(meta_of(node), kernel=choice.backend))
        return PassResult(graph_module, modified=bool(lookups), declined=tuple(declined))
