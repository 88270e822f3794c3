"""The passes, in order; ``recfx.rewrites`` has those of graphs that are data, and this package those of lowered graphs.

There is one file per pass; file name = pass name = test name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import cast

import torch

from recfx.ir.snapshot import PassRecord
from recfx.passes.base import Pass, PassResult, run_passes
from recfx.passes.freeze_indexes import FreezeIndexes
from recfx.passes.fuse_served_lookup import FuseServedLookup
from recfx.passes.lower_to_script import LowerToScript
from recfx.passes.quantize_rows import QuantizeRows
from recfx.rewrites.base import Rewrite
from recfx.rewrites.batch_lookups import batch_lookups
from recfx.rewrites.elide_hash import elide_hash
from recfx.rewrites.expand_collection import expand_collection
from recfx.rewrites.fuse_hash_lookup import fuse_hash_lookup
from recfx.rewrites.insert_dist import insert_dist
from recfx.rewrites.insert_hash import insert_hash
from recfx.rewrites.insert_transfers import insert_transfers
from recfx.rewrites.lower import lower
from recfx.serving import SCRIPT, FrozenIndex, ServingTarget


def passes() -> tuple[Rewrite, ...]:
    """All passes for one collection, in the order in which they run."""
    return (
        Rewrite("expand_collection", expand_collection),
        Rewrite("insert_dist", insert_dist),
        Rewrite("insert_hash", insert_hash),
        Rewrite("elide_hash", elide_hash),
        Rewrite("batch_lookups", batch_lookups),
        Rewrite("fuse_hash_lookup", fuse_hash_lookup),
        Rewrite("insert_transfers", insert_transfers),
        Rewrite("lower", lower),
    )


def export_passes() -> tuple[Rewrite, ...]:
    """The passes for an exported collection, in the order in which they run; ``serving_passes`` come after them."""
    return (
        Rewrite("expand_collection", expand_collection),
        Rewrite("insert_hash", insert_hash),
        Rewrite("elide_hash", elide_hash),
        Rewrite("batch_lookups", batch_lookups),
    )


def serving_passes(
    indexes: Mapping[str, Mapping[str, FrozenIndex]] = MappingProxyType({}),
    dtypes: Mapping[str, Mapping[str, torch.dtype]] = MappingProxyType({}),
    target: ServingTarget = SCRIPT,
) -> tuple[Pass, ...]:
    """The passes that make a lowered graph one of an exported collection, in the order in which they run.

    Args:
        indexes: the frozen index of each table that has one, by collection and table.
        dtypes: the dtype of stored rows, by collection and table; others keep theirs.
        target: which modules serve the nodes.
    """
    return (
        FreezeIndexes(indexes, target),
        QuantizeRows(dtypes, target),
        FuseServedLookup(target),
        LowerToScript(target),
    )


class CallablePackage(ModuleType):
    """The class of this package, which is also the public function: ``recfx.passes()``."""

    def __call__(self) -> tuple[Rewrite, ...]:
        """All passes for one collection, in the order in which they run: see :func:`recfx.passes.passes`."""
        return passes()


sys.modules[__name__].__class__ = CallablePackage
PACKAGE = cast(CallablePackage, sys.modules[__name__])
"""This package itself, typed as something to call: what ``recfx.passes`` is."""

__all__ = ["Pass", "PassRecord", "PassResult", "Rewrite", "export_passes", "passes", "run_passes", "serving_passes"]
