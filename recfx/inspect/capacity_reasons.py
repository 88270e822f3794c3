"""What is worth saying about an index: that it fills up, shares, evicts or forgets. One small rule per reason."""

from __future__ import annotations

from collections.abc import Callable

from recfx.errors import Diagnostic, Severity
from recfx.hashing import HashConfig
from recfx.inspect import capacity
from recfx.inspect.facts import IndexFacts, TableFacts
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules import class_names

MUCH_SHARED = 0.01  # of the sightings in training


def index_reasons(table: TableFacts) -> tuple[Diagnostic, ...]:
    """Every rule's answer for one table; none without an index."""
    index = table.index_facts
    if index is None:
        return ()
    return tuple(reason for rule in _RULES if (reason := rule(table, index)) is not None)


def evict_needs_fused_optimizer(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """Training would raise because of this."""
    if not index.config.evicts or not table.weight.requires_grad or isinstance(table.optimizer, FusedOptimizer):
        return None
    return Diagnostic(
        "evict_needs_fused_optimizer",
        table.module_path,
        "the table evicts ids, but no fused optimizer updates it: training will raise, because the state that any "
        "other optimizer holds for a row would be passed on to the row's next id.",
        f"attach {class_names()} to the table's parameter with torchrec's "
        "apply_optimizer_in_backward; this can be done after the conversion.",
        Severity.WARNING,
    )


def index_nearly_full(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """Soon an id will meet a bucket without a free row. If that has already happened, ``shared_answers`` says so."""
    if not capacity.nearly_full(index) or index.trained["shared_answers"] > 0:
        return None
    found = index.occupancy
    next_comes = "training stops" if index.config.on_full == "error" else "ids share rows"
    message = (
        f"{found.taken:,} of {found.rows:,} rows are taken, and in bucket {found.worst_bucket} "
        f"{found.worst_bucket_taken:,} of {found.worst_bucket_rows:,}. {_forecast(index)}; then {next_comes} "
        f"(on_full={index.config.on_full!r})."
    )
    return Diagnostic("index_nearly_full", table.module_path, message, f"{_more_rows(index)}.", Severity.WARNING)


def shared_answers(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """Ids whose bucket is full train and read rows that they share with other ids."""
    shared, seen = index.trained["shared_answers"], index.trained["ids_seen"]
    if shared == 0:
        return None
    message = f"{_part(shared, seen)} ids seen in training found their bucket full and read a row that other ids use."
    severity = Severity.WARNING if shared >= MUCH_SHARED * seen else Severity.INFO
    return Diagnostic("shared_answers", table.module_path, message, f"{_more_rows(index)}.", severity)


def eviction_churn(table: TableFacts, index: IndexFacts) -> Diagnostic | None:
    """The table is too small for the ids that come."""
    if not capacity.forgets(index):
        return None
    inserted, evicted = index.trained["inserted"], index.trained["evicted"]
    message = (
        f"{_part(evicted, inserted)} ids that got a row took it from another id, "
        f"{evicted / max(index.trained['batches'], 1):,.1f} per batch: an id keeps its row for about "
        f"{capacity.batches_kept(index):,.1f} batches, and starts from initial weights when it returns."
    )
    admit_after = 2 * index.config.admit_after
    advice = f"{_more_rows(index)}; if most ids come only once or twice, admit_after={admit_after} keeps these out."
    severity = Severity.WARNING if capacity.churns(index) else Severity.INFO
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
    found = index.candidates
    if found is None or found.full_bucket is None:
        return None
    message = (
        f"{found.waiting:,} ids wait to be admitted, and bucket {found.full_bucket} cannot count any more: each new id "
        f"makes it forget the oldest, so an id must come {index.config.admit_after} times within about "
        f"{found.batches + 1:,} batches."
    )
    advice = "nothing if rarer ids may stay out; otherwise a lower admit_after, or more rows."
    return Diagnostic("candidates_dropped", table.module_path, message, advice)


def _forecast(index: IndexFacts) -> str:
    batches, pace = capacity.batches_until_full(index), capacity.new_ids_a_batch(index)
    if index.room < 1:
        return "The next new id is likely to meet a full bucket"
    room = f"About {int(index.room):,} more ids fit before one meets a full bucket"
    if batches is None:
        return room
    return (
        f"{room}, in {batches:,} batches at the mean pace so far ({pace:,.1f} new ids per batch; later if fewer and "
        "fewer ids are new)"
    )


def _more_rows(index: IndexFacts) -> str:
    """Which config to use, and what happens to the rows trained so far."""
    config = _config(index, capacity.suggested_rows(index) or index.config.rows)
    return f"build the table with {config}; the state saved now can be loaded into it, and rows move with their ids"


def _config(index: IndexFacts, rows: int) -> str:
    """The index's config with a different number of rows, as source code: everything that is not at its default."""
    resolved, default = index.config, HashConfig()
    fields = [f"rows={rows:_}", f"dense_rows={resolved.dense_rows}", f"buckets={resolved.buckets}"]
    for name in ("on_full", "evict", "admit_after", "unseen", "seed"):
        value = getattr(resolved, name)
        if value != getattr(default, name):
            fields.append(f"{name}={value!r}")
    return f"HashConfig({', '.join(fields)})"


def _part(count: int, total: int) -> str:
    return f"{count:,} of {total:,} ({100 * count / max(total, 1):.1f}%)"


_RULES: tuple[Callable[[TableFacts, IndexFacts], Diagnostic | None], ...] = (
    evict_needs_fused_optimizer,
    index_nearly_full,
    shared_answers,
    eviction_churn,
    unseen_answers,
    candidates_dropped,
)
