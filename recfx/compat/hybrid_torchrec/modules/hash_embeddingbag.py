"""Tables: recfx's own classes take what theirs take, plain ``EmbeddingBagConfig``s included."""

from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.modules.embedding_bag_config import HashEmbeddingBagConfig

__all__ = ["HashEmbeddingBagCollection", "HashEmbeddingBagConfig"]
