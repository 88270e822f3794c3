"""Whether an index has enough rows, judged by what it has counted, and what is worth saying about that.

The counts cover all training since the index was built; a loaded state brings the counts that were saved with it. A
rank that holds a slice of a table speaks of its own slice.
"""

from __future__ import annotations

from collections.abc import Iterator

from recfx.errors import Diagnostic, Severity
from recfx.inspect.facts import ConvertedTable

NEARLY_FULL = 0.8  # share of the rows of the fullest bucket
CHURN = 0.1  # share of sightings that took over another id's row
FORGOTTEN = 0.5  # share of the ids that got a row and have lost it again
MUCH_SHARED = 0.01  # of the sightings in training


def index_reasons(table: ConvertedTable) -> Iterator[Diagnostic]:
    """What an index that holds data says, without the path of its table."""
    index = table.hashing
    if index.ids_held is None:
        return
    seen, shared, is_full = index.trained["ids_seen"], index.trained["shared_answers"], index.full_bucket is not None
    nearly_full = (index.worst_bucket_occupancy or 0.0) >= NEARLY_FULL
    again = f"{'convert the model' if table.existed else 'build the table'} anew with"
    rows = 2 * (index.rows or table.spec.num_embeddings)
    more_rows = f"save a checkpoint, {again} HashConfig(rows={rows}) or more, and load it: rows move with their ids."
    if is_full:  # no batch has been trained since
        message = (
            f"training has stopped: the last batch had more new ids for bucket {index.full_bucket} than free rows; "
            f"{index.ids_held:,} of {index.index_rows:,} rows of the table are taken."
        )
        yield Diagnostic("table_full", "", message, more_rows, Severity.ERROR)
    if nearly_full and not (index.evict or shared or is_full):  # otherwise, other reasons say so
        message = (
            f"{index.ids_held:,} of {index.index_rows:,} rows are taken, {index.worst_bucket_occupancy:.1%} of the "
            f"fullest bucket; when it is full, {'training stops' if index.on_full == 'error' else 'ids share rows'}."
        )
        yield Diagnostic("index_nearly_full", "", message, more_rows, Severity.WARNING)
    if shared:
        message = f"{_part(shared, seen)} ids seen in training found their bucket full and read a row that others use."
        severity = Severity.WARNING if shared >= MUCH_SHARED * seen else Severity.INFO
        yield Diagnostic("shared_answers", "", message, more_rows, severity)
    inserted, evicted = index.trained["inserted"], index.trained["evicted"]
    # Where ids expire, they are meant to lose their rows, unless most rows are taken.
    if evicted and evicted >= FORGOTTEN * inserted and (nearly_full or not index.ttl_batches):
        message = f"{_part(evicted, inserted)} ids that got a row took it from another id, which will start anew."
        advice = f"{more_rows[:-1]}; or keep rare ids out with admit_after={2 * (index.admit_after or 1)}."
        severity = Severity.WARNING if evicted >= CHURN * seen else Severity.INFO
        yield Diagnostic("eviction_churn", "", message, advice, severity)
    if unseen := index.evaluated["unseen_answers"]:
        read, other = ("another id's row", "zeros") if index.unseen == "share" else ("zeros", "share")
        message = f"{_part(unseen, index.evaluated['ids_seen'])} ids seen in eval mode had no row and read {read}."
        yield Diagnostic("unseen_answers", "", message, f"train on them, or use unseen={other!r}.")
    if index.forgets_candidates:
        message = f"{index.candidates:,} ids wait to be admitted, and in a full bucket each new one ousts the oldest."
        advice = "nothing if rarer ids may stay out; otherwise a lower admit_after, or more rows."
        yield Diagnostic("candidates_dropped", "", message, advice)


def _part(count: int, total: int) -> str:
    return f"{count:,} of {total:,} ({100 * count / max(total, 1):.1f}%)"
