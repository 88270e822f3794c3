"""The class of converted collections of each kind, one line per kind."""

from __future__ import annotations

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import POOLED, SEQUENCE, CollectionKind
from recfx.collections.pooled import HashEmbeddingBagCollection
from recfx.collections.sequence import HashEmbeddingCollection
from recfx.collections.subclasses import classes_made_for

CONVERTED_CLASSES: dict[CollectionKind, type[UnshardedCollection]] = {
    POOLED: HashEmbeddingBagCollection,
    SEQUENCE: HashEmbeddingCollection,
}


def converted_class(kind: CollectionKind) -> type[UnshardedCollection]:
    """The class that takes the place of the standard one of a kind, unsharded."""
    return CONVERTED_CLASSES[kind]


def all_converted_classes(kind: CollectionKind) -> list[type[UnshardedCollection]]:
    """``converted_class``, and the classes that stand for subclasses of the standard one in this process so far."""
    return [converted_class(kind), *classes_made_for(converted_class(kind))]
