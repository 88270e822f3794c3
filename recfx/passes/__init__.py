"""The rewrites, in order. There is one file per pass; file name = pass name = test name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import cast

import torch
from torch import fx

from recfx.ir.shards import CollectionSharding
from recfx.passes.base import Pass, PassRecord, PassResult, run_passes
from recfx.passes.batch_lookups import BatchLookups
from recfx.passes.elide_hash import ElideHash
from recfx.passes.expand_collection import ExpandCollection
from recfx.passes.freeze_indexes import FreezeIndexes
from recfx.passes.fuse_hash_lookup import FuseHashLookup
from recfx.passes.fuse_served_lookup import FuseServedLookup
from recfx.passes.insert_dist import InsertDist
from recfx.passes.insert_hash import InsertHash
from recfx.passes.insert_transfers import InsertTransfers
from recfx.passes.lower import Lower
from recfx.passes.lower_to_script import LowerToScript
from recfx.passes.quantize_rows import QuantizeRows
from recfx.serving import SCRIPT, FrozenIndex, ServingTarget


def passes(backend: str = "auto", sharding: CollectionSharding | None = None) -> tuple[Pass, ...]:
    """All passes for one collection, in the order in which they run.

    Args:
        backend: the kernel target of the lookups; ``"auto"`` takes the first one that can serve each lookup.
        sharding: how the collection is sharded; None if all of it is on one rank.
    """
    return (
        ExpandCollection(),
        InsertDist(sharding),
        InsertHash(),
        ElideHash(),
        BatchLookups(),
        FuseHashLookup(backend=backend),
        InsertTransfers(),
        Lower(backend=backend),
    )


def export_passes(
    indexes: Mapping[str, Mapping[str, FrozenIndex]] = MappingProxyType({}),
    dtypes: Mapping[str, Mapping[str, torch.dtype]] = MappingProxyType({}),
    target: ServingTarget = SCRIPT,
) -> tuple[Pass, ...]:
    """All passes that make the graph of an exported collection, in the order in which they run.

    Args:
        indexes: the frozen index of each table that has one, by collection and table.
        dtypes: the dtype of stored rows, by collection and table; others keep theirs.
        target: which modules serve the nodes.
    """
    return (
        ExpandCollection(),
        InsertHash(),
        ElideHash(),
        BatchLookups(),
        FreezeIndexes(indexes, target),
        QuantizeRows(dtypes, target),
        FuseServedLookup(target),
        LowerToScript(target),
    )


def run_pipeline(
    graph_module: fx.GraphModule, backend: str = "auto", sharding: CollectionSharding | None = None
) -> list[PassRecord]:
    """Run all ``passes`` on a collection's graph, in place; arguments and errors are those of the passes.

    Args:
        graph_module: a collection that has not been expanded yet: placeholder, one call, output.
        backend: as for ``passes``.
        sharding: as for ``passes``.
    """
    return run_passes(graph_module, passes(backend, sharding))


class CallablePackage(ModuleType):
    """The class of this package, which is also the public function: ``recfx.passes()``."""

    def __call__(self, backend: str = "auto", sharding: CollectionSharding | None = None) -> tuple[Pass, ...]:
        """All passes for one collection, in the order in which they run: see :func:`recfx.passes.passes`."""
        return passes(backend, sharding)


sys.modules[__name__].__class__ = CallablePackage
PACKAGE = cast(CallablePackage, sys.modules[__name__])
"""This package itself, typed as something to call: what ``recfx.passes`` is."""

__all__ = ["Pass", "PassRecord", "PassResult", "export_passes", "passes", "run_passes", "run_pipeline"]
