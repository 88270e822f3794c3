"""What each kind of node does. ``FORMULAS`` has a function for each kind; a kind without one is an error.

A formula always gives the backward as well: :func:`work_of` drops it if the step has none.

The formulas count what must be moved: each id and each length once, a row per id, each pooled value once, as if a
batch's keys had to be put into order.
"""

from collections.abc import Callable
from typing import Any

from recfx.errors import ConversionError
from recfx.planner.pricing.node_facts import NodeFacts, TableLoad
from recfx.planner.pricing.work import NOTHING, Phases, Work

ID_BYTES, LENGTH_BYTES, WEIGHT_BYTES = 8, 8, 4
# A find reads one group of four slots, which is one line of the cache: at most four of nine slots of an index are
# filled, so that an id is nearly always in its first group.
PROBE_BYTES = 64
# The operations of a fused step per element: the square, its sum, the root, the division, the update.
STEP_FLOPS = 6

Formula = Callable[[NodeFacts], Phases]


def _batch_bytes(facts: NodeFacts) -> Any:
    return (ID_BYTES + (WEIGHT_BYTES if facts.is_weighted else 0)) * facts.ids + LENGTH_BYTES * facts.bags


def move_ids(facts: NodeFacts) -> Phases:
    """Reads ids, lengths and weights, and writes them in another order, if they are not in that order yet."""
    size = _batch_bytes(facts) if facts.moves else 0
    return Phases(Work(size, size))


def move_rows(facts: NodeFacts) -> Phases:
    """Reads the rows of its value, and writes them in another order, or changed; in the backward, their gradients."""
    return Phases.same(Work(facts.value_bytes, facts.value_bytes))


def dedup_ids(facts: NodeFacts) -> Phases:
    """Looks every id up among those before it, and writes its number; different ids are read again and written."""
    ids = sum(table.ids for table in facts.tables)
    kept = _batch_bytes(facts)
    return Phases(
        Work(
            read_bytes=(ID_BYTES + PROBE_BYTES) * ids + kept,
            written_bytes=ID_BYTES * ids + kept,
            random_accesses=ids,
            indexes=len(facts.tables),
        )
    )


def copy(facts: NodeFacts) -> Phases:
    """Copies ids, or rows, and lengths between the host and a device."""
    return Phases(Work(copied_bytes=_batch_bytes(facts)))


def hash_ids(facts: NodeFacts) -> Phases:
    """Finds each id's slot; in training, a table that evicts or admits also counts the id."""
    return Phases(Work.total([_find(table, facts.trains) for table in facts.tables]))


def lookup(facts: NodeFacts) -> Phases:
    """Reads a row per id, and writes a sum per bag, or the rows; the backward reads gradients and steps rows."""
    forward = Work.total([_pool(table, facts.is_weighted) for table in facts.tables])
    return Phases(forward, Work.total([_backward(table) for table in facts.tables if table.is_trained]))


def hash_lookup(facts: NodeFacts) -> Phases:
    """Both, without writing rows out and reading them again."""
    hashed, pooled = hash_ids(facts), lookup(facts)
    rows = ID_BYTES * facts.ids
    return Phases(hashed.forward + pooled.forward + Work(read_bytes=-rows, written_bytes=-rows), pooled.backward)


def order_columns(facts: NodeFacts) -> Phases:
    """Puts ranges of columns into order, row by row; a single range, or rows of several dims, are only renamed."""
    if facts.ranges < 2:
        return Phases(Work())
    return Phases.same(Work(facts.value_bytes, facts.value_bytes, copied_ranges=facts.rows * facts.ranges))


FORMULAS: dict[str, Formula] = {
    "collection": lookup,  # one that is not expanded: its lookups
    "select_features": move_ids,
    "dedup_ids": dedup_ids,
    "bucketize": move_ids,
    "input_dist_start": move_ids,
    "input_dist_wait": move_ids,
    "to_host": copy,
    "hash_ids": hash_ids,
    "find_rows": hash_ids,
    "to_device": copy,
    "lookup": lookup,
    "hash_lookup": hash_lookup,
    "output_dist_start": move_rows,
    "output_dist_wait": move_rows,
    "expand_rows": move_rows,
    "mean_divide": move_rows,
    "keyed_tensor": order_columns,
    "jagged_dict": order_columns,
}


def work_of(facts: NodeFacts, number: Callable[[Any], Any]) -> tuple[Work, Work]:
    """The work of a node, forward and backward, as ``number`` gives it; without a formula, ``kind_without_cost``."""
    if facts.kind not in FORMULAS:
        raise ConversionError(
            f"nodes of kind {facts.kind!r} have no formula for their cost.",
            reason="kind_without_cost",
            what_to_do="pass price= to recfx.add_operator.",
        )
    phases = FORMULAS[facts.kind](facts)
    return phases.forward.mapped(number), (phases.backward if facts.trains else NOTHING).mapped(number)


def _find(table: TableLoad, counts: bool) -> Work:
    rows = ID_BYTES * table.ids
    if not table.spec.has_index:
        return Work(read_bytes=rows, written_bytes=rows)
    found = Work(rows + PROBE_BYTES * table.ids, rows, random_accesses=table.ids, indexes=1)
    if not (counts and (table.spec.evicts or table.spec.admits)):
        return found
    return found + Work(8 * table.ids, 8 * table.ids, random_accesses=table.ids)  # scores of rows, or sightings


def _pool(table: TableLoad, is_weighted: bool) -> Work:
    per_id = ID_BYTES + table.row_bytes + (WEIGHT_BYTES if is_weighted else 0)
    dim, is_pooled = table.spec.embedding_dim, table.spec.is_pooled
    return Work(
        read_bytes=per_id * table.ids + (LENGTH_BYTES * table.bags if is_pooled else 0),
        written_bytes=table.spec.output_dtype.itemsize * dim * table.returned_rows,
        flops=dim * (2 if is_weighted else 1) * table.ids if is_pooled else 0,
        random_accesses=table.ids,
        tables=1,
    )


def _backward(table: TableLoad) -> Work:
    """A fused step sorts ids first. The ids of a bag have one gradient, which is read from memory once."""
    dim = table.spec.embedding_dim
    gradients = table.spec.output_dtype.itemsize * dim * table.returned_rows
    if table.rule is None:
        # A gradient of the whole table, which is cleared before the rows are added up.
        whole = table.row_bytes * table.spec.num_embeddings
        return Work(
            read_bytes=(ID_BYTES + table.row_bytes) * table.ids + gradients,
            written_bytes=whole + table.row_bytes * table.ids,
            flops=dim * table.ids,
            random_accesses=table.ids,
            tables=1,
        )
    touched = table.distinct_rows
    states = 1 if table.state_row_bytes else 0
    kept = table.row_bytes + table.state_row_bytes
    return Work(
        read_bytes=ID_BYTES * table.ids + gradients + kept * touched, written_bytes=kept * touched,
        flops=dim * table.ids + STEP_FLOPS * dim * touched, random_accesses=(1 + states) * touched,
        sorted_ids=table.ids, tables=1,
    )  # fmt: skip
