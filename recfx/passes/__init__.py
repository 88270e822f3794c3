"""The passes, in order: rewrites of graphs that are data. One file per pass; file name = pass name = test name.

They import ``recfx.ir``, ``recfx.errors`` and each other, and nothing else of the project.

Example:
    >>> [one_pass.name for one_pass in recfx.passes()][:2]
    ['expand_collection', 'insert_dist']
"""

import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import cast

import torch

from recfx.passes import (
    batch_lookups,
    dedup_ids,
    elide_hash,
    expand_collection,
    freeze_indexes,
    fuse_hash_lookup,
    fuse_served_lookup,
    insert_dist,
    insert_hash,
    insert_transfers,
    lower,
)
from recfx.passes.base import Pass, PassRecord, PassResult, Rewrite, Rewriting, run_passes
from recfx.passes.quantize_rows import QuantizeRows


def passes() -> tuple[Rewrite, ...]:
    """All passes for one collection, in the order in which they run."""
    return (
        Rewrite("expand_collection", expand_collection.expand_collection),
        Rewrite("insert_dist", insert_dist.insert_dist),
        Rewrite("dedup_ids", dedup_ids.dedup_ids),
        Rewrite("insert_hash", insert_hash.insert_hash),
        Rewrite("elide_hash", elide_hash.elide_hash),
        Rewrite("batch_lookups", batch_lookups.batch_lookups),
        Rewrite("fuse_hash_lookup", fuse_hash_lookup.fuse_hash_lookup),
        Rewrite("insert_transfers", insert_transfers.insert_transfers),
        Rewrite("lower", lower.lower),
    )


def export_passes(of_collection: tuple[Pass, ...] | None = None) -> tuple[Pass, ...]:
    """The passes for an exported collection, in the order in which they run; ``serving_passes`` come after them.

    Args:
        of_collection: the passes that make the collection's own graph; None: those of ``recfx.passes()``.
    """
    chosen = passes() if of_collection is None else of_collection
    return tuple(pass_ for pass_ in chosen if not (isinstance(pass_, Rewrite) and pass_.call in _NOT_IN_FILES))


_NOT_IN_FILES = (
    insert_dist.insert_dist,
    dedup_ids.dedup_ids,
    fuse_hash_lookup.fuse_hash_lookup,
    insert_transfers.insert_transfers,
    lower.lower,
)
"""What a file has no use for, because one process reads it; and ``lower``, which is the last of ``serving_passes``."""


def serving_passes(dtypes: Mapping[str, Mapping[str, torch.dtype]] = MappingProxyType({})) -> tuple[Pass, ...]:
    """The passes that make the graph of an exported collection, in the order in which they run.

    What serves its nodes is up to the targets of the graph's context, as in models.

    Args:
        dtypes: the dtype of stored rows, by collection and table; others keep theirs.
    """
    return (
        Rewrite("freeze_indexes", freeze_indexes.freeze_indexes),
        QuantizeRows(dtypes),
        Rewrite("fuse_served_lookup", fuse_served_lookup.fuse_served_lookup),
        Rewrite("lower", lower.lower),
    )


class CallablePackage(ModuleType):
    """The class of this package, which is also the public function: ``recfx.passes()``."""

    def __call__(self) -> tuple[Rewrite, ...]:
        """All passes for one collection, in the order in which they run: see :func:`recfx.passes.passes`."""
        return passes()


sys.modules[__name__].__class__ = CallablePackage
PACKAGE = cast(CallablePackage, sys.modules[__name__])
"""This package itself, typed as something to call: what ``recfx.passes`` is."""

__all__ = [
    "Pass",
    "PassRecord",
    "PassResult",
    "Rewrite",
    "Rewriting",
    "export_passes",
    "passes",
    "run_passes",
    "serving_passes",
]


def __dir__() -> list[str]:
    return __all__
