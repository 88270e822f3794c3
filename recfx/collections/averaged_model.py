"""torch's ``AveragedModel`` of models with hashed tables: the averages follow the ids.

It averages row by row, and copies or even averages the buffers. But a row may belong to another id since the last
update, and ids are no numbers to take averages of. With :func:`extend_averaging`, an index of the averaged model first
takes over the state of the model's, and rows that have another id now start from what that id starts from: its initial
weights, or its own average if it only has another row. So the averages of a table are those of a standard table that
has had a row for every id from the start.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from recfx.collections.converted_collection import ConvertedCollection, converted_collections
from recfx.collections.wrap_once import wrap_once
from recfx.errors import ConversionError
from recfx.hashing import HashIndex
from recfx.kernels.index.index_buffers import NEW, is_taken


def extend_averaging() -> None:
    """Extend ``AveragedModel``; called once by ``first_use``, and idempotent."""
    wrap_once(AveragedModel, "update_parameters", _follow_ids)


def _follow_ids(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def extended(averaged: AveragedModel, model: nn.Module) -> None:
        _check_indexes(averaged, model)
        indexes = []
        pairs = zip(_collections(averaged), _collections(model), strict=False)  # torch checks the models, too
        for mine, theirs in pairs:
            for name in mine.hash_indexes:
                _take_over(mine, theirs, name)
                indexes += [mine.index(name), theirs.index(name)]
        with _without_buffers(indexes):
            original(averaged, model)

    return extended


def _check_indexes(averaged: AveragedModel, model: nn.Module) -> None:
    """Refuse an average of another model, such as one that was made before the conversion.

    Raises:
        ConversionError: ``other_indexes``.
    """
    mine, theirs = (
        [sorted(collection.hash_indexes) for collection in _collections(model_or_average)]
        for model_or_average in (averaged, model)
    )
    if any(mine + theirs) and mine != theirs:
        raise ConversionError(
            "the averaged model does not have the indexes of the model that it is updated with.",
            reason="other_indexes",
            what_to_do="make the AveragedModel from the converted model, and update it with that model.",
        )


def _collections(model: nn.Module) -> list[ConvertedCollection]:
    return list(converted_collections(model).values())


@torch.no_grad()
def _take_over(mine: ConvertedCollection, theirs: ConvertedCollection, name: str) -> None:
    """Give an index of the averaged model the state of the model's, and its rows the averages of the new ids."""
    source, index, average = theirs.index(name), mine.index(name), mine.weight(name).detach()
    buffers, before = source.index_buffers(), index.index_buffers()
    stayed = is_taken(before.row_state) & (before.row_ids == buffers.row_ids)
    changed = torch.nonzero(is_taken(buffers.row_state) & ~stayed).squeeze(1)
    if changed.numel() == 0:
        index.take_state(buffers)
        return
    old_rows = index.find(buffers.row_ids[changed])
    has_moved = old_rows >= 0
    moved = average[old_rows[has_moved].to(average.device)]
    row_state = buffers.row_state.clone()
    row_state[changed] = NEW
    new_rows = torch.full_like(before.uninitialized, changed.numel())
    index.take_state(buffers._replace(row_state=row_state, uninitialized=new_rows))
    index.refresh()  # writes the initial weights
    # If initial weights are not a function of the id, an average starts from the weights now.
    if any(table.custom_init_fn for table in mine.tables if table.name == index.name):
        rows = changed.to(average.device)
        average[rows] = theirs.weight(name).detach()[changed.to(theirs.weight(name).device)].to(average)
    average[changed[has_moved].to(average.device)] = moved


@contextlib.contextmanager
def _without_buffers(indexes: list[HashIndex]) -> Iterator[None]:
    """Inside, nobody who lists the buffers of a module finds those of these indexes."""
    buffers_of: list[tuple[HashIndex, dict[str, Any]]] = [(index, index.__dict__["_buffers"]) for index in indexes]
    try:
        for index, _ in buffers_of:
            index.__dict__["_buffers"] = {}
        yield
    finally:
        for index, buffers in buffers_of:
            index.__dict__["_buffers"] = buffers
