"""Tables: recfx's own classes take what theirs take, plain ``EmbeddingBagConfig``s included."""

from recfx.collections.collection import HashEmbeddingBagCollection
from recfx.collections.embedding_bag_config import HashEmbeddingBagConfig

__all__ = ["HashEmbeddingBagCollection", "HashEmbeddingBagConfig"]
