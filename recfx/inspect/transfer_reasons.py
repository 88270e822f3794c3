"""What is worth saying about the copies between the host and the device of a collection's tables."""

from __future__ import annotations

from recfx.collections.converted_collection import ConvertedCollection
from recfx.errors import Diagnostic
from recfx.hashing import HashIndex
from recfx.runtime import FindRows
from recfx.runtime.host_copies import crosses


def transfer_reasons(collection: ConvertedCollection, path: str) -> tuple[Diagnostic, ...]:
    """At most one reason for the collection as a whole.

    Args:
        collection: a converted collection, sharded or not.
        path: its fully qualified name in the model.
    """
    device = collection.store.device
    indexes = [index for index in collection.hash_indexes.values() if isinstance(index, HashIndex)]
    if not any(crosses(device, index.row_ids.device) for index in indexes):
        return ()
    where = f"its tables are on {device}, but its ids are hashed on the host, where the indexes are: "
    found = [module for module in collection.graph_of(training=False).children() if isinstance(module, FindRows)]
    if found and not any(node.finds_on_host for node in found):
        message = (
            f"{where}each forward in training copies ids to the host and their rows to the device (nodes to_host and "
            "to_device). In eval mode, rows are found on the device (node find_rows), in copies of the indexes that "
            f"take {sum(node.copies.bytes for node in found)} bytes there, and that are made again for the first batch "
            "after the indexes have changed."
        )
    else:
        message = (
            f"{where}each forward copies ids to the host and their rows to the device (nodes to_host and to_device); "
            f"in eval mode as well, because {_why_not_in_eval(collection, found)}"
        )
    advice = (
        "nothing; recfx.TrainPipeline copies the next batch's ids ahead, and hashes them while the device computes."
    )
    return (Diagnostic("hashed_on_host", path, message, advice),)


def _why_not_in_eval(collection: ConvertedCollection, found: list[FindRows]) -> str:
    if found:
        return found[0].finds_on_host
    if collection.is_sharded:
        return "rows of sharded tables are found on the host only."
    declined = [one for record in collection.pass_records for one in record.declined if one.code == "found_on_host"]
    if declined:
        return declined[0].message
    return (
        "the nodes of its graph are part of a graph of the whole model, which was made when its tables were elsewhere."
    )
