"""lower: each lookup gets the kernel that serves it, from the registry.

The choice holds for the tables as they are; a lookup whose tables move or change dtype chooses again by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from recfx.ir.meta import annotate
from recfx.ir.typed_access import find_module, meta_of, node_module
from recfx.nodes import HashIds, Lookup
from recfx.passes._nodes import nodes_of_kind
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class Lower:
    """Choose kernels.

    Args:
        backend: ``"auto"``, or the one backend that every lookup must use.
    """

    backend: str = "auto"
    name: str = "lower"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place; declines name the backends that were passed over.

        Raises:
            ConversionError: the named backend cannot serve a lookup.
        """
        declined = []
        lookups = nodes_of_kind(graph_module, "lookup")
        for node in lookups:
            module = node_module(graph_module, node, Lookup)
            module.backend = self.backend
            choice = module.choose_kernel()
            declined += [replace(refusal, path=module.collection, node=node.name) for refusal in choice.declined]
            annotate(node, replace(meta_of(node), kernel=choice.backend))
        for node in nodes_of_kind(graph_module, "hash_ids"):
            self._fuse(graph_module, node)
        return PassResult(graph_module, modified=bool(lookups), declined=tuple(declined))

    def _fuse(self, graph_module: fx.GraphModule, node: fx.Node) -> None:
        """Where one lookup takes all that ``hash_ids`` gives, and can find rows itself, the two are one kernel."""
        hash_ids = node_module(graph_module, node, HashIds)
        users = [find_module(graph_module, user) for user in node.users]
        lookups = [user for user in users if isinstance(user, Lookup) and user.finds_ids]
        hash_ids.inside_lookup = len(users) == len(lookups) == 1
        if hash_ids.inside_lookup:
            annotate(node, replace(meta_of(node), kernel=lookups[0].choose_kernel().backend))
