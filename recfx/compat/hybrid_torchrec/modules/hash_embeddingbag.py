"""Tables: recfx's own classes take what theirs take, plain ``EmbeddingBagConfig``s included."""

from recfx.modules.collection import HashEmbeddingBagCollection, HashEmbeddingBagConfig

__all__ = ["HashEmbeddingBagCollection", "HashEmbeddingBagConfig"]
