"""Whether an index has enough rows, judged by what it has counted, and what is worth saying about that.

The counts cover all training since the index was built; a loaded state brings the counts that were saved with it.
Figures per batch are means over all batches, unless a monitor has read newer ones. A rank that holds a slice of a table
forecasts for its own slice, and assumes that the other slices are like it when it says how many rows the table should
have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from recfx.errors import Diagnostic, Severity
from recfx.hashing import HashConfig, ResolvedHashConfig
from recfx.hashing.usable_share import rows_for
from recfx.inspect.facts import IndexFacts, TableFacts
from recfx.inspect.index_health import ENOUGH_BATCHES
from recfx.ir.tables import TableSpec

NEARLY_FULL = 0.8  # share of the expected ids; at an even pace, a quarter of the batches so far still fit
COMFORTABLE = 0.7  # share of the usable rows that may be taken in an index of the suggested size
CHURN = 0.1  # share of sightings that took over another id's row
SEVERAL = 3  # ids that the idle batches would have added
FORGOTTEN = 0.5  # share of the ids that got a row and have lost it again


def suggested_rows(index: IndexFacts) -> int | None:
    """How many physical rows the table should have, with its present buckets; None if it has enough.

    Never fewer than it has now.

    - ``on_full="error"``, and ``"share"`` as long as nothing is shared: so many that the ids held now, and those that
      are still to come, take 70 % of the usable rows. To come are, if a monitor has seen the pace fall, those of
      ``ids_to_come``; if it has seen it stay or rise, as many as came so far; if only the mean pace is known, which is
      usually too high, half as many.
    - If a batch has stopped training, at least twice the rows: how many ids it had is not counted.
    - ``on_full="share"`` otherwise: ids without a row are not counted, but their sightings are; see ``_ids_sharing``.
    - ``on_full="evict"``: twice the rows, once half of the ids that got a row have lost it.
    """
    config, taken = index.config, index.occupancy.taken
    if not index.buckets:
        return None
    if forgets(index):
        enough = 2 * config.index_rows
    elif index.trained["shared_answers"] > 0:
        enough = _rows_for(taken + _ids_sharing(index), index)
    elif nearly_full(index):
        again = min(index.trained["inserted"], taken)
        if index.latest is None or index.earlier is None:
            again = math.ceil(again / 2)
        expected = ids_to_come(index) if index.full_bucket is None else None
        enough = _rows_for(taken + (again if expected is None else min(again, math.ceil(expected))), index)
        if index.full_bucket is not None:
            enough = max(enough, 2 * config.index_rows)
    else:
        return None
    return config.dense_rows + max(enough, config.index_rows)


def nearly_full(index: IndexFacts) -> bool:
    """Whether most of the ids that are expected to fit have come, and more do than fit; or one has stopped training.

    An index that evicts is meant to be full.
    """
    if index.full_bucket is not None:
        return True
    taken = index.occupancy.taken
    is_most = not index.config.evicts and taken > 0 and taken >= NEARLY_FULL * (taken + index.room)
    return is_most and not has_stopped(index) and not _all_fit(index)


def has_stopped(index: IndexFacts) -> bool:
    """Whether no more ids come: none in the last ten batches or more, and several would have at the mean pace."""
    expected = index.idle * _mean_pace(index)
    return index.idle >= ENOUGH_BATCHES and expected >= SEVERAL


def new_ids_a_batch(index: IndexFacts) -> float:
    """Mean number of ids that a batch of training has added: lately, if a monitor knows that, otherwise so far.

    0 before the first batch, and if no more ids come.
    """
    if has_stopped(index):
        return 0.0
    if index.latest is not None:
        batches, inserted = index.latest
        return inserted / batches
    return _mean_pace(index)


def ids_to_come(index: IndexFacts) -> float | None:
    """About how many ids are still to come, if fewer and fewer are new; None if the pace stays, rises or is not known.

    With g1 new ids in one window of a monitor and g2 in the next, which is as long, the pace falls by q = g2 / g1 a
    window. If it goes on to do so, as it does where the ids of a fixed set are drawn at random, the windows to come
    bring g2 * (q + q**2 + ...) = g2 * q / (1 - q) ids. Windows of b1 and b2 batches fall by the ratio of their paces to
    the power of 2 * b2 / (b1 + b2), because their middles are (b1 + b2) / 2 batches apart. What chance makes of the
    difference (its standard deviation is about sqrt(g1 + g2)) is not taken for a fall.
    """
    q = _fall(index)
    return None if q is None or index.latest is None else index.latest[1] * q / (1 - q)


def _fall(index: IndexFacts) -> float | None:
    """The q of ``ids_to_come``; None if that is."""
    if index.latest is None or index.earlier is None or index.earlier[1] == 0:
        return None
    (b1, g1), (b2, g2) = index.earlier, index.latest
    of_pace = (g2 + math.sqrt(g1 * b2 / b1 + g2)) / b2 / (g1 / b1)
    return of_pace ** (2 * b2 / (b1 + b2)) if of_pace < 1 else None


def _all_fit(index: IndexFacts) -> bool:
    """Whether the pace falls so fast that all ids that are still to come have room."""
    expected = ids_to_come(index)
    return expected is not None and expected <= index.room


def _mean_pace(index: IndexFacts) -> float:
    """Mean number of ids that a batch of training has added so far, without those that were erased."""
    added = min(index.trained["inserted"], index.occupancy.taken)
    return added / max(index.trained["batches"], 1)


def batches_until_full(index: IndexFacts) -> int | None:
    """About how many more batches fit before an id meets a full bucket, at the pace of ``new_ids_a_batch``.

    If a monitor has seen that pace fall, it goes on to do so. Otherwise this is a lower estimate if fewer and fewer ids
    are new, as is usual, and an upper one if more and more are. None if nothing is added, if all ids that are to come
    fit, if there were fewer than ten batches, and if rows are evicted.
    """
    pace = new_ids_a_batch(index)
    if pace <= 0 or index.trained["batches"] < ENOUGH_BATCHES or index.config.evicts or _all_fit(index):
        return None
    q, expected = _fall(index), ids_to_come(index)
    if q is None or expected is None or index.latest is None:
        return int(index.room / pace)
    return int(index.latest[0] * math.log1p(-index.room / expected) / math.log(q))


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


def _rows_for(ids: int, index: IndexFacts) -> int:
    """How many rows the whole table needs for this many ids in the index's part of it."""
    return rows_for(math.ceil(ids / index.part), index.config.buckets, COMFORTABLE)


def _ids_sharing(index: IndexFacts) -> int:
    """About how many ids share rows: their sightings, in proportion to the ids held and the sightings of those.

    A lower estimate, because rare ids come later than common ones; it is at least doubled, and at most one id per
    sighting.
    """
    shared, taken = index.trained["shared_answers"], index.occupancy.taken
    alone = max(index.trained["ids_seen"] - shared, 1)
    return min(shared, max(taken, taken * shared // alone))


MUCH_SHARED = 0.01  # of the sightings in training


def index_reasons(table: TableFacts) -> tuple[Diagnostic, ...]:
    """Every rule's answer for one table; none without an index."""
    index = table.index_facts
    if index is None:
        return ()
    return tuple(reason for rule in _RULES if (reason := rule(table, index)) is not None)


def index_nearly_full(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """Soon an id will meet a bucket without a free row. If that has already happened, ``shared_answers`` says so."""
    if not nearly_full(index) or index.trained["shared_answers"] > 0 or index.full_bucket is not None:
        return None
    taken = index.occupancy
    next_comes = "training stops" if index.config.on_full == "error" else "ids share rows"
    message = (
        f"{taken.taken:,} of {taken.rows:,} rows are taken, and in bucket {taken.worst_bucket} "
        f"{taken.worst_bucket_taken:,} of {taken.worst_bucket_rows:,}. {_forecast(index)}; then {next_comes} "
        f"(on_full={index.config.on_full!r})."
    )
    advice = f"{_more_rows(table, index)}."
    if not index.is_watched:
        advice += (
            " recfx.monitor(model) shows while it trains how fast tables fill, and this forecast then goes by the "
            "latest pace."
        )
    return Diagnostic("index_nearly_full", table.module_path, message, advice, Severity.WARNING)


def table_full(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """A batch had more new ids than there are rows for, and none has been trained since."""
    if index.full_bucket is None:
        return None
    taken = index.occupancy
    message = (
        f"training has stopped: the last batch had more new ids for bucket {index.full_bucket} than free rows "
        f"(on_full='error'); {taken.taken:,} of {taken.rows:,} rows of the table are taken."
    )
    return Diagnostic("table_full", table.module_path, message, f"{_more_rows(table, index)}.", Severity.ERROR)


def shared_answers(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """Ids whose bucket is full train and read rows that they share with other ids."""
    shared, seen = index.trained["shared_answers"], index.trained["ids_seen"]
    if shared == 0:
        return None
    message = f"{_part(shared, seen)} ids seen in training found their bucket full and read a row that other ids use."
    severity = Severity.WARNING if shared >= MUCH_SHARED * seen else Severity.INFO
    return Diagnostic("shared_answers", table.module_path, message, f"{_more_rows(table, index)}.", severity)


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
    advice = f"{_more_rows(table, index)}. If most ids come {seldom}, admit_after={admit_after} keeps them out."
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
    batches, pace = batches_until_full(index), new_ids_a_batch(index)
    if index.occupancy.taken == index.occupancy.rows:
        return "No row is free for a new id"
    if index.room < 1:
        return "The next new id is likely to meet a full bucket"
    room = f"About {int(index.room):,} more ids fit before one meets a full bucket"
    word = "batch" if batches == 1 else "batches"
    if index.latest is not None:
        if batches is None:
            return f"{room} (none came in the latest {index.latest[0]:,} batches)"
        expected = ids_to_come(index)
        falls = "" if expected is None else f", and falling: about {expected:,.0f} are still to come"
        return f"{room}, in {batches:,} {word} at the latest pace ({pace:,.1f} new ids per batch{falls})"
    if batches is None:
        return room
    return (
        f"{room}, in {batches:,} {word} at the mean pace so far ({pace:,.1f} new ids per batch, and now at most so "
        "many if fewer and fewer are new)"
    )


def _more_rows(table: TableFacts, index: IndexFacts) -> str:
    """Which config to use, and what happens to the rows trained so far."""
    if not table.existed:
        config = _config(index.config, suggested_rows(index) or index.config.rows)
        return f"build the table with {config}; {_ROWS_MOVE}"
    return (
        f"save a checkpoint, build the model anew, convert it with hashing={_OF_ALL} before optimizers are attached, "
        f"and load: {_ROWS_MOVE}"
    )


_ROWS_MOVE = "the state saved now can be loaded into it, and rows move with their ids"
_OF_ALL = "<of all tables>"


def with_hashing(
    reasons: Iterable[Diagnostic], tables: Iterable[TableSpec], rows: Mapping[str, int]
) -> tuple[Diagnostic, ...]:
    """The reasons, with one ``hashing=`` for all tables that change in those that advise more rows.

    Args:
        reasons: of ``index_reasons``, and others.
        tables: all converted tables of the model.
        rows: the suggested rows, by name of the table. Other tables stay as they are, and are not shown.
    """
    reasons = tuple(reasons)
    if not any(_OF_ALL in reason.what_to_do for reason in reasons):  # of most collections, of which there may be many
        return reasons
    specs = {table.name: table for table in tables if table.hashing is None or table.hashing.has_index}
    entries = [
        f"{name!r}: {_config(table.hashing, rows[name])}"
        for name, table in specs.items()
        if name in rows and table.hashing is not None
    ]
    hashing, others = f"{{{', '.join(entries)}}}", len(specs) - len(entries)
    merging = ""
    if others:
        hashing = f"{{**before, {hashing[1:]}"
        whose = "the other table keeps its own" if others == 1 else f"the other {others:,} tables keep theirs"
        merging = (
            f" Here before is the hashing= of the conversion, by name of the table, so that {whose} (if it was one "
            "config for all, before = dict.fromkeys(names, config) with the names of all tables)."
        )

    def filled(advice: str) -> str:
        if _OF_ALL not in advice:
            return advice
        return advice.replace(_OF_ALL, hashing).replace(f"{_ROWS_MOVE}.", f"{_ROWS_MOVE}.{merging}")

    return tuple(replace(reason, what_to_do=filled(reason.what_to_do)) for reason in reasons)


def _config(resolved: ResolvedHashConfig, rows: int) -> str:
    """A config with a different number of rows, as source code: everything that is not at its default."""
    default = HashConfig()
    fields = [f"rows={rows:_}", f"dense_rows={resolved.dense_rows}", f"buckets={resolved.buckets}"]
    for name in ("on_full", "evict", "ttl_batches", "admit_after", "unseen", "seed", "find_on_device"):
        value = getattr(resolved, name)
        if value != getattr(default, name):
            fields.append(f"{name}={value!r}")
    return f"recfx.HashConfig({', '.join(fields)})"


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
