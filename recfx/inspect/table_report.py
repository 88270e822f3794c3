"""The report of one table as data."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.errors import Diagnostic
from recfx.inspect.sharding_report import ShardingReport


@dataclass(frozen=True)
class HashingReport:
    """How the ids of a table become rows.

    Args:
        mode: ``"static"`` (ids are rows, as in the standard collection), ``"adopted"`` (ids are rows, range-checked) or
            ``"index"`` (raw ids get rows). The other fields are None, or empty, if they have no meaning.
        rows: number of physical rows.
        dense_rows: ids below this number are their own row.
        buckets: number of buckets that the other rows are divided into.
        on_full: what happens to a new id whose bucket is full.
        evict: which id is evicted; ``""`` if ids are not evicted.
        admit_after: sightings before an id gets a row.
        unseen: what an id without a row reads in eval mode, or before it is admitted.
        seed: the seed of buckets, shared rows and initial rows.
        ids_held: ids that have a row in the index; None on meta.
        occupancy: share of the index's rows that are taken.
        worst_bucket: number of the fullest bucket.
        worst_bucket_occupancy: share of that bucket's rows that are taken.
        counters: (name, count) pairs of what has happened so far; see :attr:`HashIndex.counters`.
        candidates: number of ids that were seen but not admitted; None with ``admit_after=1``.
        longest_probe: number of slot groups (cache lines) that the slowest lookup reads.
        index_bytes: size of the index, without the weight.
        usable_share: the share of the index's rows expected to be taken when the first id meets a full bucket.
        room: number of new ids that are expected to fit before one meets a full bucket.
        batches_until_full: batches until then at the mean pace so far: a lower estimate if fewer and fewer ids are
            new, an upper one if more and more are. None before training, and with ``on_full="evict"``.
        suggested_rows: a value for ``HashConfig.rows``, with the present buckets; None if more rows are not needed.
        rows_here: number of rows of the index that these figures are about: those of the table, or those of a rank's
            slice of a table whose rows are cut. None on meta, and if this rank has none.
    """

    mode: str
    rows: int | None = None
    dense_rows: int | None = None
    buckets: int | None = None
    on_full: str = ""
    evict: str = ""
    admit_after: int | None = None
    unseen: str = ""
    seed: int | None = None
    ids_held: int | None = None
    occupancy: float | None = None
    worst_bucket: int | None = None
    worst_bucket_occupancy: float | None = None
    counters: tuple[tuple[str, int], ...] = ()
    candidates: int | None = None
    longest_probe: int | None = None
    index_bytes: int | None = None
    usable_share: float | None = None
    room: int | None = None
    batches_until_full: int | None = None
    suggested_rows: int | None = None
    rows_here: int | None = None


@dataclass(frozen=True)
class TableReport:
    """One table.

    Args:
        name: as in its config.
        features: keys of the batch that read it.
        embedding_names: their keys in the output.
        rows: number of physical rows.
        dim: number of columns.
        pooling: ``"SUM"`` or ``"MEAN"``; ``""`` if the collection does not pool.
        dtype: dtype of the weight.
        device: device of the weight; ``""`` if the collection does not show it.
        bytes: size of the weight.
        hashing: how ids become rows; None in a collection that was not converted.
        kernel: the backend that serves its lookup; ``""`` in a collection that was not converted.
        kernels_passed_over: the backends that come before it, and why they were not taken.
        optimizer: what updates it: ``"none: gradients to weight.grad"``, ``"fused <rule>"``, or
            ``"in backward, not fused: <reason>"``.
        custom_init_fn: whether it has its own ``init_fn``, which fills new rows.
        reasons: those of the report's reasons that are about this table.
        sharding: where its parts are; None if it is not sharded. ``rows``, ``dim`` and ``bytes`` are those of the whole
            table; ``device``, ``kernel`` and ``optimizer`` are those of this rank's part, ``""`` if it has no part.
    """

    name: str
    features: tuple[str, ...]
    embedding_names: tuple[str, ...]
    rows: int
    dim: int
    pooling: str
    dtype: str
    device: str
    bytes: int
    hashing: HashingReport | None = None
    kernel: str = ""
    kernels_passed_over: tuple[Diagnostic, ...] = ()
    optimizer: str = ""
    custom_init_fn: bool = False
    reasons: tuple[Diagnostic, ...] = ()
    sharding: ShardingReport | None = None
