"""Whether an index has enough rows, judged by what it has counted, and what is worth saying about that.

The counts cover all training since the index was built; a loaded state brings the counts that were saved with it. A
rank that holds a slice of a table speaks of its own slice.
"""

from __future__ import annotations

from collections.abc import Callable

from recfx.errors import Diagnostic, Severity
from recfx.inspect.facts import IndexFacts, TableFacts

NEARLY_FULL = 0.8  # share of the expected ids; at an even pace, a quarter of the batches so far still fit
CHURN = 0.1  # share of sightings that took over another id's row
FORGOTTEN = 0.5  # share of the ids that got a row and have lost it again
ENOUGH_BATCHES = 10  # of training, for a pace


def nearly_full(index: IndexFacts) -> bool:
    """Whether most of the ids that are expected to fit have come. An index that evicts is meant to be full."""
    taken = index.occupancy.taken
    return not index.config.evicts and taken > 0 and taken >= NEARLY_FULL * (taken + index.room)


def batches_until_full(index: IndexFacts) -> int | None:
    """About how many more batches fit before an id meets a full bucket, at the mean pace so far.

    A lower estimate if fewer and fewer ids are new, as is usual. None if nothing is added, if there were fewer than ten
    batches, and if rows are evicted.
    """
    added, batches = min(index.trained["inserted"], index.occupancy.taken), index.trained["batches"]
    if added <= 0 or batches < ENOUGH_BATCHES or index.config.evicts:
        return None
    return int(index.room * batches / added)


def forgets(index: IndexFacts) -> bool:
    """Whether half of the ids that got a row have lost it to another id, however few sightings that is.

    Where ids expire, they are meant to lose their rows, unless most rows are taken.
    """
    evicted, taken = index.trained["evicted"], index.occupancy.taken
    if index.config.ttl_batches and taken < NEARLY_FULL * (taken + index.room):
        return False
    return evicted > 0 and evicted >= FORGOTTEN * index.trained["inserted"]


def batches_kept(index: IndexFacts) -> float:
    """For how many batches an id keeps its row, on average: its rows, divided by the evictions per batch.

    J. D. C. Little, "A proof for the queuing formula L = lambda W", Operations Research 9 (1961), 383-387.
    """
    return index.index_rows * index.trained["batches"] / max(index.trained["evicted"], 1)


MUCH_SHARED = 0.01  # of the sightings in training


def index_reasons(table: TableFacts) -> tuple[Diagnostic, ...]:
    """Every rule's answer for one table; none without an index."""
    index = table.index_facts
    if index is None:
        return ()
    return tuple(reason for rule in _RULES if (reason := rule(table, index)) is not None)


def index_nearly_full(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """Soon an id will meet a bucket without a free row. If that has already happened, other reasons say so."""
    if not nearly_full(index) or index.trained["shared_answers"] > 0 or index.full_bucket is not None:
        return None
    taken = index.occupancy
    next_comes = "training stops" if index.config.on_full == "error" else "ids share rows"
    message = (
        f"{taken.taken:,} of {taken.rows:,} rows are taken, and in bucket {taken.worst_bucket} "
        f"{taken.worst_bucket_taken:,} of {taken.worst_bucket_rows:,}. {_forecast(index)}; then {next_comes} "
        f"(on_full={index.config.on_full!r})."
    )
    return Diagnostic("index_nearly_full", table.module_path, message, f"{_more_rows(table)}.", Severity.WARNING)


def table_full(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """A batch had more new ids than there are rows for, and none has been trained since."""
    if index.full_bucket is None:
        return None
    taken = index.occupancy
    message = (
        f"training has stopped: the last batch had more new ids for bucket {index.full_bucket} than free rows "
        f"(on_full='error'); {taken.taken:,} of {taken.rows:,} rows of the table are taken."
    )
    return Diagnostic("table_full", table.module_path, message, f"{_more_rows(table)}.", Severity.ERROR)


def shared_answers(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """Ids whose bucket is full train and read rows that they share with other ids."""
    shared, seen = index.trained["shared_answers"], index.trained["ids_seen"]
    if shared == 0:
        return None
    message = f"{_part(shared, seen)} ids seen in training found their bucket full and read a row that other ids use."
    severity = Severity.WARNING if shared >= MUCH_SHARED * seen else Severity.INFO
    return Diagnostic("shared_answers", table.module_path, message, f"{_more_rows(table)}.", severity)


def eviction_churn(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """The table is too small for the ids that come."""
    if not forgets(index):
        return None
    inserted, evicted = index.trained["inserted"], index.trained["evicted"]
    message = (
        f"{_part(evicted, inserted)} ids that got a row took it from another id, "
        f"{evicted / max(index.trained['batches'], 1):,.1f} per batch: an id keeps its row for about "
        f"{batches_kept(index):,.1f} batches, and starts from initial weights when it returns."
    )
    admit_after = 2 * index.config.admit_after  # an id gets its row when it comes for this time
    seldom = "only once" if admit_after == 2 else f"fewer than {admit_after} times"
    advice = f"{_more_rows(table)}. If most ids come {seldom}, admit_after={admit_after} keeps them out."
    severity = Severity.WARNING if evicted >= CHURN * index.trained["ids_seen"] else Severity.INFO
    return Diagnostic("eviction_churn", table.module_path, message, advice, severity)


def unseen_answers(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """Ids without a row were read in eval mode."""
    unseen, shares = index.evaluated["unseen_answers"], index.config.unseen == "share"
    if unseen == 0:
        return None
    read = "read another id's row" if shares else "read zeros"
    message = f"{_part(unseen, index.evaluated['ids_seen'])} ids seen in eval mode had no row and {read}."
    advice = "train on them" + (", or use unseen='zeros'." if shares else ", or use unseen='share'.")
    return Diagnostic("unseen_answers", table.module_path, message, advice)


def candidates_dropped(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """A bucket is counting as many ids as it can, so rare ids are forgotten before they are admitted."""
    candidates = index.candidates
    if candidates is None or candidates.full_bucket is None:
        return None
    message = (
        f"{candidates.waiting:,} ids wait to be admitted, and bucket {candidates.full_bucket} cannot count any more: "
        f"each new id makes it forget the oldest, so an id must come {index.config.admit_after} times within about "
        f"{candidates.batches + 1:,} batches."
    )
    advice = "nothing if rarer ids may stay out; otherwise a lower admit_after, or more rows."
    return Diagnostic("candidates_dropped", table.module_path, message, advice)


def _forecast(index: IndexFacts) -> str:
    if index.occupancy.taken == index.occupancy.rows:
        return "No row is free for a new id"
    if index.room < 1:
        return "The next new id is likely to meet a full bucket"
    room = f"About {int(index.room):,} more ids fit before one meets a full bucket"
    batches = batches_until_full(index)
    word = "batch" if batches == 1 else "batches"
    return room if batches is None else f"{room}, in {batches:,} {word} at the mean pace so far"


def _more_rows(table: TableFacts) -> str:
    """Which config to use, and what happens to the rows trained so far."""
    config = table.spec.hashing
    rows = 2 * (table.spec.num_embeddings if config is None else config.rows)
    if not table.existed:
        return f"build the table with HashConfig(rows={rows}) or more and the other settings as they are; {_ROWS_MOVE}"
    return (
        f"save a checkpoint, build the model anew, convert it with HashConfig(rows={rows}) or more for this table and "
        f"the other settings as they are, before optimizers are attached, and load: {_ROWS_MOVE}"
    )


_ROWS_MOVE = "the state saved now can be loaded into it, and rows move with their ids"


def _part(count: int, total: int) -> str:
    return f"{count:,} of {total:,} ({100 * count / max(total, 1):.1f}%)"


_RULES: tuple[Callable[[TableFacts, IndexFacts], Diagnostic | None], ...] = (
    table_full,
    index_nearly_full,
    shared_answers,
    eviction_churn,
    unseen_answers,
    candidates_dropped,
)
