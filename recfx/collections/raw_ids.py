"""What takes the place of a managed-collision collection: a collection of raw ids, with the same output."""

from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recfx.collections.converted_collection import index_of
from recfx.collections.kinds import kind_of
from recfx.errors import CheckpointError, ConversionError
from recfx.hashing import HashIndex
from recfx.runtime.base import NodeModule


class RawIdCollection(nn.Module):
    """Calls a collection of raw ids as users call TorchRec's managed-collision collections, whose names of parameters
    and private attributes it has. ``collection`` is the converted one; a standard one until it is replaced.
    """

    _embedding_module: Any

    def __init__(self, collection: nn.Module, return_remapped_features: bool) -> None:
        super().__init__()
        self._embedding_module = collection
        self._return_remapped_features = return_remapped_features
        self._remapped = RemappedRows(self) if return_remapped_features else None

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

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[Any, KeyedJaggedTensor | None]:
        """What the collection returns for ``features``, raw ids; and their rows, or None. ``mutate_miss_lengths`` makes
        no difference: no id loses its place.
        """
        if self._remapped is not None and getattr(self._embedding_module, "is_sharded", False):
            raise rows_of_sharded(self._embedding_module.collection)
        embeddings = self._embedding_module(features)
        if self._remapped is None:
            return embeddings, None
        return embeddings, self._remapped(features)


class RemappedRows(NodeModule):
    """The rows that a collection has read for a batch: those that the collection of ``parent`` has by then."""

    def __init__(self, parent: RawIdCollection) -> None:
        super().__init__()
        self.__dict__["parent"] = parent  # no child, because this is one of its own

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` with the row that each id reads in its place, or -1, in the order of the tables' features."""
        parent: Any = self.parent
        collection: Any = getattr(parent._embedding_module, "hashed", parent._embedding_module)
        features = maybe_td_to_kjt(features, None)
        configs = kind_of(collection).configs_of(collection)
        tables = [config.name for config in configs for _ in config.feature_names]
        keys = [feature for config in configs for feature in config.feature_names]
        order = [features.keys().index(key) for key in keys]
        if order != list(range(len(features.keys()))):
            features = features.permute(order)
        pieces = features.values().split(features.length_per_key())
        rows = [
            _rows(index_of(collection, table), ids.long(), collection.training)
            for table, ids in zip(tables, pieces, strict=True)
        ]
        return KeyedJaggedTensor(
            keys=features.keys(), values=torch.cat(rows).to(features.values().dtype), lengths=features.lengths(),
            weights=features.weights_or_none(), stride=features.stride(),
            stride_per_key_per_rank=features._stride_per_key_per_rank,
            inverse_indices=features.inverse_indices_or_none(),
        )  # fmt: skip


def _rows(index: HashIndex | None, ids: torch.Tensor, training: bool) -> torch.Tensor:
    """The rows that a forward has just read for ``ids``: in training, ids whose bucket is full share rows as well."""
    if index is None:
        return ids
    rows = index.find(ids)
    if index.config.unseen == "zeros" and not (training and index.config.on_full == "share"):
        return rows
    if index.config.unseen == "zeros" and index.config.admit_after > 1:
        raise ConversionError(
            "return_remapped_features cannot tell ids that share a row from ids that are not admitted yet.",
            reason="id_without_row",
            module_path=index.name,
            what_to_do="convert with HashConfig(unseen='share'), admit_after=1 or another on_full.",
        )
    return torch.where(rows < 0, index.shared_rows(ids), rows)


def refuse_returned_rows(model: nn.Module) -> None:
    """Raise a ``ConversionError``, ``rows_of_sharded``, for a model to be sharded that returns the rows of ids."""
    for path, module in model.named_modules():
        if isinstance(module, RawIdCollection) and module._remapped is not None:
            raise rows_of_sharded(path)


def rows_of_sharded(path: str) -> ConversionError:
    """The error for a collection whose rows are asked for, but are spread over ranks."""
    return ConversionError(
        "return_remapped_features asks for the rows of ids, which are on several ranks.",
        reason="rows_of_sharded",
        module_path=path,
        what_to_do="build the managed-collision collection without return_remapped_features, or do not shard it.",
    )
