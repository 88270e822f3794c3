"""Whether an index has enough rows, judged by what it has counted, and what is worth saying about that.

The counts cover all training since the index was built; a loaded state brings the counts that were saved with it. A
rank that holds a slice of a table speaks of its own slice.
"""

from __future__ import annotations

from collections.abc import Callable

from recfx.errors import Diagnostic, Severity
from recfx.inspect.facts import ConvertedTable
from recfx.inspect.table_report import HashingReport

NEARLY_FULL = 0.8  # share of the rows of the fullest bucket
CHURN = 0.1  # share of sightings that took over another id's row
FORGOTTEN = 0.5  # share of the ids that got a row and have lost it again
MUCH_SHARED = 0.01  # of the sightings in training


def index_reasons(table: ConvertedTable) -> tuple[Diagnostic, ...]:
    """Every rule's answer for one table; none without an index that holds data."""
    if table.hashing.ids_held is None:
        return ()
    return tuple(reason for rule in _RULES if (reason := rule(table, table.hashing)) is not None)


def table_full(table: ConvertedTable, index: HashingReport) -> Diagnostic | None:
    """A batch had more new ids than there are rows for, and none has been trained since."""
    if index.full_bucket is None:
        return None
    message = (
        f"training has stopped: the last batch had more new ids for bucket {index.full_bucket} than free rows; "
        f"{index.ids_held:,} of {index.index_rows:,} rows of the table are taken."
    )
    return Diagnostic("table_full", table.module_path, message, _more_rows(table), Severity.ERROR)


def index_nearly_full(table: ConvertedTable, index: HashingReport) -> Diagnostic | None:
    """Soon an id will meet a bucket without a free row. If that has already happened, other reasons say so."""
    if not _nearly_full(index) or index.evict or index.trained["shared_answers"] or index.full_bucket is not None:
        return None
    message = (
        f"{index.ids_held:,} of {index.index_rows:,} rows are taken, {index.worst_bucket_occupancy:.1%} of the fullest "
        f"bucket; when it is full, {'training stops' if index.on_full == 'error' else 'ids share rows'}."
    )
    return Diagnostic("index_nearly_full", table.module_path, message, _more_rows(table), Severity.WARNING)


def shared_answers(table: ConvertedTable, index: HashingReport) -> Diagnostic | None:
    """Ids whose bucket is full train and read rows that they share with other ids."""
    shared, seen = index.trained["shared_answers"], index.trained["ids_seen"]
    if shared == 0:
        return None
    message = f"{_part(shared, seen)} ids seen in training found their bucket full and read a row that other ids use."
    severity = Severity.WARNING if shared >= MUCH_SHARED * seen else Severity.INFO
    return Diagnostic("shared_answers", table.module_path, message, _more_rows(table), severity)


def eviction_churn(table: ConvertedTable, index: HashingReport) -> Diagnostic | None:
    """Half of the ids that got a row have lost it. Where ids expire, they are meant to, unless most rows are taken."""
    inserted, evicted = index.trained["inserted"], index.trained["evicted"]
    if evicted == 0 or evicted < FORGOTTEN * inserted or (index.ttl_batches and not _nearly_full(index)):
        return None
    message = (
        f"{_part(evicted, inserted)} ids that got a row took it from another id, which starts from initial weights "
        "when it returns."
    )
    advice = f"{_more_rows(table)[:-1]}; or keep rare ids out with admit_after={2 * (index.admit_after or 1)}."
    severity = Severity.WARNING if evicted >= CHURN * index.trained["ids_seen"] else Severity.INFO
    return Diagnostic("eviction_churn", table.module_path, message, advice, severity)


def unseen_answers(table: ConvertedTable, index: HashingReport) -> Diagnostic | None:
    """Ids without a row were read in eval mode."""
    unseen = index.evaluated["unseen_answers"]
    if unseen == 0:
        return None
    read, other = ("another id's row", "zeros") if index.unseen == "share" else ("zeros", "share")
    message = f"{_part(unseen, index.evaluated['ids_seen'])} ids seen in eval mode had no row and read {read}."
    return Diagnostic("unseen_answers", table.module_path, message, f"train on them, or use unseen={other!r}.")


def candidates_dropped(table: ConvertedTable, index: HashingReport) -> Diagnostic | None:
    """A bucket is counting as many ids as it can, so rare ids are forgotten before they are admitted."""
    if not index.forgets_candidates:
        return None
    message = (
        f"{index.candidates:,} ids wait to be admitted, and a bucket cannot count any more: each new id makes it "
        "forget the oldest."
    )
    advice = "nothing if rarer ids may stay out; otherwise a lower admit_after, or more rows."
    return Diagnostic("candidates_dropped", table.module_path, message, advice)


def _nearly_full(index: HashingReport) -> bool:
    return (index.worst_bucket_occupancy or 0.0) >= NEARLY_FULL


def _more_rows(table: ConvertedTable) -> str:
    """The config to use; what was trained moves with its ids."""
    rows = 2 * (table.hashing.rows or table.spec.num_embeddings)
    again = "convert the model anew with" if table.existed else "build the table anew with"
    return f"save a checkpoint, {again} HashConfig(rows={rows}) or more, and load it: rows move with their ids."


def _part(count: int, total: int) -> str:
    return f"{count:,} of {total:,} ({100 * count / max(total, 1):.1f}%)"


_RULES: tuple[Callable[[ConvertedTable, HashingReport], Diagnostic | None], ...] = (
    table_full,
    index_nearly_full,
    shared_answers,
    eviction_churn,
    unseen_answers,
    candidates_dropped,
)
