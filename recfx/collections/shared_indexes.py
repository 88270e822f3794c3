"""Tables of one weight have one index, so a state that is loaded has to have the same rows for the ids of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from recfx.collections.converted_collection import ConvertedCollection
from recfx.errors import CheckpointError


def check_shared_indexes(collections: Iterable[tuple[str, ConvertedCollection]], saved: Mapping[str, object]) -> None:
    """Refuse a state in which tables that share an index have different ones: the last to be loaded would win.

    Args:
        collections: the collections that are loaded, with the prefixes of their keys. Each fits its part of the state.
        saved: the whole state.

    Raises:
        CheckpointError: ``tied_tables``.
    """
    first: dict[int, tuple[str, Tensor]] = {}
    for prefix, collection in collections:
        for table in collection.hash_indexes:
            index, key = collection.index(table), f"{prefix}hash_indexes.{table}.row_ids"
            rows = saved.get(key) if index.shared_by > 1 else None
            if not isinstance(rows, Tensor) or rows.is_meta:
                continue
            name, others = first.setdefault(id(index), (key, rows))
            if not torch.equal(rows.cpu(), others.cpu()):
                raise CheckpointError(
                    f"The saved {key} is not {name}, but in this model these tables have one weight and so one index.",
                    reason="tied_tables",
                    module_path=prefix + table,
                    what_to_do="Load it into a model whose tables have weights of their own, as when it was saved; or "
                    "leave out what was saved of one of the tables (strict=False).",
                )
