"""What takes the place of a managed-collision collection: a collection of raw ids, with the same output."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import CheckpointError


class RawIdCollection(nn.Module):
    """Calls a collection of raw ids as users call TorchRec's managed-collision collections.

    Names of parameters and private attributes are those of TorchRec's ``ManagedCollisionEmbeddingCollection``, except
    for what remapped the ids. ``collection`` is the converted one; a standard one until it is replaced.
    """

    _embedding_module: Any

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self._embedding_module = collection
        self._return_remapped_features = False

    @property
    def tables(self) -> Any:
        return self._embedding_module.tables

    def index(self, table: str) -> Any:
        return self._embedding_module.index(table)

    def weight(self, table: str) -> Any:
        return self._embedding_module.weight(table)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Refuse the state of TorchRec's managed collisions, whose ids the index would not know."""
        if any(key.startswith(f"{prefix}_managed_collision_collection.") for key in state_dict):
            raise CheckpointError(
                "the state is that of managed collisions, and this collection is converted: its index would not know "
                "the ids of the rows.",
                reason="checkpoint_mismatch",
                module_path=prefix.removesuffix("."),
                what_to_do="load the state into the model as it was before the conversion, then call recfx.convert.",
            )
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> tuple[Any, None]:
        """What the collection returns for ``features``, raw ids, and None in the place of their rows.

        Args:
            features: at least the features of the collection, in any order.
            mutate_miss_lengths: makes no difference: no id loses its place.
        """
        return self._embedding_module(features), None
