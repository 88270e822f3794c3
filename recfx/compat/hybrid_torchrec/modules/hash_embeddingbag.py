"""Pooled tables: recfx's own classes take what theirs take, plain ``EmbeddingBagConfig``s included."""

from recfx.collections.hash_collections import HashEmbeddingBagCollection, HashEmbeddingBagConfig

__all__ = ["HashEmbeddingBagCollection", "HashEmbeddingBagConfig"]
