"""Sequence tables: recfx's own classes take what theirs take, plain ``EmbeddingConfig``s included."""

from recfx.collections.hash_collections import HashEmbeddingCollection, HashEmbeddingConfig

__all__ = ["HashEmbeddingCollection", "HashEmbeddingConfig"]
