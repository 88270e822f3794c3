"""insert_transfers: the copies between the host, which hashes, and the device of the tables become nodes.

Indexes are always on the host. If the tables are on another device, ids are copied to the host before they are hashed
(``to_host``), and their rows to the device before they are looked up (``to_device``). If ranks exchange ids on the
host, they are copied before they are sent. The pass leaves a collection alone whose tables are on the host as well.
"""

from torch import fx

from recfx.ir.operator_graph import OperatorGraph
from recfx.passes.base import PassResult


def insert_transfers(graph: OperatorGraph) -> PassResult:
    """Insert ``to_host`` before ``hash_ids``, or before ids are sent, and ``to_device`` after ``hash_ids``."""
    for hash_ids in graph.of_kind("hash_ids"):
        collection = graph.collection(hash_ids)
        if not collection.copies_ids:
            continue
        if collection.sharding is not None and collection.ids_on_host:
            _copy_before_sending(graph, collection.name)
        else:  # the bags stay on the device, because hashing only needs to know how many ids each key has
            (ids,) = hash_ids.all_input_nodes
            with graph.graph.inserting_before(hash_ids):
                hash_ids.args = (graph.add("to_host", (ids,), collection.name),)
        rows = graph.first_value(hash_ids)
        with graph.graph.inserting_after(rows):
            graph.replace(rows, graph.add("to_device", (rows,), collection.name))
    return PassResult(graph)


def _copy_before_sending(graph: OperatorGraph, collection: str) -> None:
    """Ranks send lengths and weights along with the ids."""
    for select in graph.of_kind("select_features"):
        senders: list[fx.Node] = [
            user for user in select.users if graph.kind(user) in ("dedup_ids", "bucketize", "input_dist_start")
        ]
        if graph.collection(select).name == collection and senders:
            with graph.graph.inserting_before(senders[0]):
                copy = graph.add("to_host", (select,), collection, with_bags=True)
            for sender in senders:
                sender.replace_input_with(select, copy)
