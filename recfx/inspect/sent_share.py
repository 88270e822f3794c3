"""How many of the ids of a table were different, where each different id is sent once."""

from __future__ import annotations

from recfx.collections.converted_collection import ConvertedCollection
from recfx.runtime.dedup_ids import DedupIds


class SentShare:
    """The ids of one table in training: those that were sent, and all.

    Args:
        node: the node that leaves ids out.
        keys: the positions of the table's keys.
    """

    def __init__(self, node: DedupIds, keys: list[int]) -> None:
        self._node, self._keys = node, keys
        self._before = self.so_far()

    def so_far(self) -> tuple[int, int]:
        """The different ids, and all of them, since the graph was made."""
        return sum(self._node.different[key] for key in self._keys), sum(self._node.ids[key] for key in self._keys)

    def since_last_time(self) -> tuple[int, int]:
        """Count both since this was last called, or since this object was made."""
        before, self._before = self._before, self.so_far()
        return self._before[0] - before[0], self._before[1] - before[1]


def shares_of_sent(collection: ConvertedCollection) -> dict[str, SentShare]:
    """The tables of a collection that send each different id once, by name."""
    nodes = [node for node in collection.graph_module.children() if isinstance(node, DedupIds)]
    if not nodes:
        return {}
    names = (name for table in collection.tables for name in table.embedding_names)
    keys = {name: position for position, name in enumerate(names)}
    return {
        table.name: SentShare(nodes[0], [keys[name] for name in table.embedding_names])
        for table in collection.tables
        if table.sends_different
    }
