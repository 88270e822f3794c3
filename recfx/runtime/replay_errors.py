"""Why a forward cannot be run again inside a backward, as activation checkpointing does."""

from __future__ import annotations

from recfx.errors import InputError
from recfx.ir.tables import TableSpec

REASONS = ("replayed_ids_evicted", "replayed_ids_absent", "replayed_rows_renewed", "replayed_rows_unknown")
"""Why, in the order in which ranks tell each other."""


def elsewhere(collection: str, reason: str) -> InputError:
    """Another rank of a sharded collection cannot run it again, for one of ``REASONS``."""
    return InputError(
        "activation checkpointing runs a forward again, which another rank cannot do: rows of its tables have changed "
        "since.",
        reason=reason,
        module_path=collection,
        what_to_do="see that rank's own error; no rank has trained this batch.",
    )


def lost(collection: str, table: TableSpec) -> InputError:
    """Ids of the first run have no row any more."""
    if table.evicts:
        return InputError(
            f"activation checkpointing runs a forward again, but ids of table {table.name!r} have lost their "
            "rows to later batches meanwhile.",
            reason="replayed_ids_evicted",
            module_path=collection,
            what_to_do="run a batch's backward before the next batch's forward; or use torch.utils.checkpoint with "
            "use_reentrant=False, which keeps rows for as many later forwards as batches_in_flight of the collection "
            "says; or leave the collection out of it.",
        )
    return InputError(
        f"a forward inside a backward has ids of table {table.name!r} that have no row.",
        reason="replayed_ids_absent",
        module_path=collection,
        what_to_do="such a forward is taken for activation checkpointing, which has no new ids. Run "
        "forwards of new batches outside of backwards; erase no ids between a forward and its backward.",
    )


def renewed(collection: str, table: TableSpec) -> InputError:
    """Rows of the first run hold other weights now."""
    return InputError(
        "activation checkpointing runs a forward again, but ids that are not admitted shared rows of table "
        f"{table.name!r} which later batches have given to other ids, with new weights.",
        reason="replayed_rows_renewed",
        module_path=collection,
        what_to_do="run a batch's backward before the next batch's forward; or use HashConfig(unseen='zeros'); or "
        "leave the collection out of activation checkpointing.",
    )


def unknown(collection: str, table: TableSpec) -> InputError:
    """Nobody kept what the first run answered."""
    return InputError(
        "a forward runs inside a backward, as with activation checkpointing, but it is not known which ids of "
        f"table {table.name!r} were admitted when it first ran.",
        reason="replayed_rows_unknown",
        module_path=collection,
        what_to_do="checkpoint with torch.utils.checkpoint, and a function that calls the collection with the same "
        "ids each time; or leave the collection out of it. Run forwards of new batches outside of backwards.",
    )
