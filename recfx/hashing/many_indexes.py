"""What every batch asks of all indexes of a collection, in some models thousands, at little cost per index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfx.hashing.index import HashIndex
from recfx.hashing.storage import watched
from recfx.kernels.build import forks
from recfx.kernels.index.index_buffers import IndexView


def buffers_named(name: str, indexes: Sequence[HashIndex]) -> list[Tensor]:
    """The buffer of this name of each index; reading attributes of the modules would take ten times as long."""
    buffers: list[Any] = [index._buffers for index in indexes]
    return [tensors[name] for tensors in buffers]


def views_of(indexes: Sequence[HashIndex], training: bool) -> list[IndexView]:
    """``HashIndex.view`` of each index.

    Raises:
        CheckpointError: as in ``HashIndex.refresh``.
    """
    if torch.compiler.is_compiling():
        return [index.view(training) for index in indexes]
    forks.use_one_thread_in_child()
    kept: list[Any] = [index.__dict__["_views"] for index in indexes]
    slot_groups = buffers_named("slot_groups", indexes)
    return [
        views[training] if as_noted and views is not None and views[0].slot_groups is groups else index.view(training)
        for index, views, groups, as_noted in zip(indexes, kept, slot_groups, _are_as_noted(indexes), strict=True)
    ]


def _are_as_noted(indexes: Sequence[HashIndex]) -> list[bool]:
    """``is_as_noted`` of each index. Every batch asks for all of them, in some models for thousands."""
    try:
        return [
            attributes["_leader"] is None
            and not attributes["_expects_load"]
            and attributes["_versions"] == (ids._version, state._version, groups._version, side._version)
            for attributes in map(vars, indexes)
            for ids, state, groups, side in (watched(attributes["_buffers"]),)
        ]
    except RuntimeError:  # inference tensors have no versions
        return [index.is_as_noted() for index in indexes]
