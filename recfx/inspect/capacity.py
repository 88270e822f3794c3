"""Whether an index has enough rows, judged by what it has counted: forecasts, and how many rows would be enough.

The counts cover all training since the index was built; a loaded state brings the counts that were saved with it.
Figures per batch are means over all batches. A rank that holds a slice of a table forecasts for its own slice, and
assumes that the other slices are like it when it says how many rows the table should have.
"""

from __future__ import annotations

import math

from recfx.hashing.usable_share import rows_for
from recfx.inspect.facts import IndexFacts

NEARLY_FULL = 0.8  # share of the expected ids; at an even pace, a quarter of the batches so far still fit
COMFORTABLE = 0.7  # share of the usable rows that may be taken in an index of the suggested size
CHURN = 0.1  # share of sightings that took over another id's row
FORGOTTEN = 0.5  # share of the ids that got a row and have lost it again


def suggested_rows(index: IndexFacts) -> int | None:
    """How many physical rows the table should have, with its present buckets; None if it has enough.

    Never fewer than it has now.

    - ``on_full="error"``, and ``"share"`` as long as nothing is shared: so many that the ids held now, and the same
      number of new ids again at the mean pace, take 70 % of the usable rows. That is room for at least twice the
      batches so far.
    - ``on_full="share"`` otherwise: ids without a row are not counted, but their sightings are; see ``_ids_sharing``.
    - ``on_full="evict"``: twice the rows, once half of the ids that got a row have lost it.
    """
    config, taken = index.config, index.occupancy.taken
    if not index.buckets:
        return None
    if forgets(index):
        wanted = 2 * config.index_rows
    elif index.trained["shared_answers"] > 0:
        wanted = _rows_for(taken + _ids_sharing(index), index)
    elif nearly_full(index):
        wanted = _rows_for(taken + min(index.trained["inserted"], taken), index)
    else:
        return None
    return config.dense_rows + max(wanted, config.index_rows)


def nearly_full(index: IndexFacts) -> bool:
    """Whether most of the ids that are expected to fit have come. An index that evicts is meant to be full."""
    taken = index.occupancy.taken
    return not index.config.evicts and taken > 0 and taken >= NEARLY_FULL * (taken + index.room)


def new_ids_a_batch(index: IndexFacts) -> float:
    """Mean number of ids that a batch of training has added so far; erased ids do not count. 0 before the first."""
    added = min(index.trained["inserted"], index.occupancy.taken)
    return added / max(index.trained["batches"], 1)


def batches_until_full(index: IndexFacts) -> int | None:
    """About how many more batches fit before an id meets a full bucket, at the mean pace so far.

    A lower estimate if fewer and fewer ids are new, as is usual; an upper one if more and more are. None if nothing has
    been added yet, and if rows are evicted.
    """
    pace = new_ids_a_batch(index)
    return None if index.config.evicts or pace == 0 else int(index.room / pace)


def forgets(index: IndexFacts) -> bool:
    """Whether half of the ids that got a row have lost it to another id, however few sightings that is."""
    evicted = index.trained["evicted"]
    return evicted > 0 and evicted >= FORGOTTEN * index.trained["inserted"]


def churns(index: IndexFacts) -> bool:
    """Whether ids lose their rows about as fast as others get them: besides, a tenth of all sightings evicted an id."""
    return forgets(index) and index.trained["evicted"] >= CHURN * index.trained["ids_seen"]


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
