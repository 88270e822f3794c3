"""The kinds of collections that recfx converts: one file per kind, and the one list that names them all."""

from __future__ import annotations

from torch import nn

from recfx.collections.kinds.collection_kind import CollectionKind
from recfx.collections.kinds.pooled import POOLED
from recfx.collections.kinds.sequence import SEQUENCE

KINDS: list[CollectionKind] = [POOLED, SEQUENCE]


def standard_kind(module: nn.Module) -> CollectionKind | None:
    """The kind of a standard collection, also of a subclass; None for everything else.

    A converted collection that stands for a subclass of the user's is an instance of that subclass, too.
    """
    return next((kind for kind in KINDS if isinstance(module, kind.standard)), None)


def kind_of(collection: nn.Module) -> CollectionKind:
    """The kind of a standard or converted collection. Attributes that users add cannot hide it.

    Raises:
        TypeError: ``collection`` is neither.
    """
    kind = getattr(type(collection), "_kind", None)
    if not isinstance(kind, CollectionKind):
        kind = standard_kind(collection)
    if kind is None:
        raise TypeError(f"{type(collection).__name__} is no collection of a known kind")
    return kind


def shown_by(module: nn.Module) -> tuple[str, str] | None:
    """By which method and attribute a class that implements one of TorchRec's interfaces shows configs and tables.

    None if it implements none of them.
    """
    return next(((kind.configs, kind.tables) for kind in KINDS if isinstance(module, kind.interface)), None)


def table_in(path: str) -> tuple[str, str]:
    """The collection and the table that the path of a table's module names; the table is ``""`` if it names none."""
    for kind in KINDS:
        owner, prefix, table = path.rpartition(f"{kind.tables}.")
        if prefix:
            return owner.removesuffix("."), table
    return path, ""


__all__ = ["KINDS", "POOLED", "SEQUENCE", "CollectionKind", "kind_of", "shown_by", "standard_kind", "table_in"]
