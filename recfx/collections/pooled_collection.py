"""What a converted pooled collection shows as ``EmbeddingBagCollection`` does, whether it is sharded or not."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import POOLED

_Collection = TypeVar("_Collection", bound="PooledCollection")


class PooledCollection(ConvertedCollection):
    """Pooled embeddings.

    Attributes:
        embedding_bags: the modules that hold the weights.
    """

    _kind = POOLED
    embedding_bags: nn.ModuleDict
    _embedding_bag_configs: list[EmbeddingBagConfig]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of the whole tables, in order; ``num_embeddings`` are physical rows."""
        return self._embedding_bag_configs

    def path_of_root(self) -> str:
        """The name under which a graph finds the collection if the collection is the root of the trace."""
        return "embedding_bag_collection"

    @property
    def embedding_bag_collection(self: _Collection) -> _Collection:
        """This collection itself, which the graph of ``torch.fx.symbolic_trace(collection)`` calls."""
        return self
