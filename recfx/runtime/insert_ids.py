"""``insert_ids``: gives rows to the ids for which ``find_ids`` found none; batches do this in order."""

from __future__ import annotations

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.runtime.bags import with_values
from recfx.runtime.base import NodeModule
from recfx.runtime.find_ids import FoundRows
from recfx.runtime.hash_ids import HashIds, hash_batch
from recfx.runtime.replays import is_replay


class InsertIds(NodeModule):
    """Insert the ids that have no row. None of the tables evicts or admits ids: ``split_hash_ids`` leaves those whole.

    Args:
        hash_ids: the node that this node is a part of, and whose mode it follows.
    """

    def __init__(self, hash_ids: HashIds) -> None:
        super().__init__()
        self.hash_ids = hash_ids

    def forward(self, features: KeyedJaggedTensor, found: FoundRows | None) -> KeyedJaggedTensor:
        """Return and do what ``hash_ids`` would for ``features``.

        The rows in ``found`` are not used if they are no longer right, in eval mode, and in a forward that activation
        checkpointing runs again.

        Raises:
            The errors of ``HashIds.forward``.
        """
        indexes, training = self.hash_ids.indexes, self.hash_ids.training
        if not indexes.begin(features, training):
            return features
        if found is not None and training and not is_replay() and found.are_right:
            return self.insert_absent(features, found)
        return hash_batch(indexes, features, training)[0]

    def insert_absent(self, features: KeyedJaggedTensor, found: FoundRows) -> KeyedJaggedTensor:
        """The rows in ``found``, completed for the ids that have none."""
        rows = found.rows
        if bool((rows == -1).any()):
            self.hash_ids.indexes.insert_absent(features, found.ids, rows)
        else:
            self.hash_ids.indexes.count_resident(features)
        return with_values(features, rows.to(features.values().device), features.weights_or_none())
