"""What is worth saying about the copies between the host and the device of a collection's tables."""

from __future__ import annotations

from recfx.diagnostics import Diagnostic
from recfx.hashing import HashIndex
from recfx.modules.converted_collection import ConvertedCollection
from recfx.nodes.host_copies import crosses


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
    message = (
        f"its tables are on {device}, but its ids are hashed on the host, where the indexes are: each forward copies "
        "ids to the host and their rows to the device (nodes to_host and to_device)."
    )
    advice = (
        "nothing; recfx.TrainPipeline copies the next batch's ids ahead, and hashes them while the device computes."
    )
    return (Diagnostic("hashed_on_host", path, message, advice),)
