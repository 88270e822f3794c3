"""The report of one table as data."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.diagnostics import Diagnostic
from recfx.inspect.sharding_report import ShardingReport


@dataclass(frozen=True)
class HashingReport:
    """How the ids of a table become rows.

    Args:
        mode: ``"static"`` (ids are rows, as in the standard collection), ``"adopted"`` (ids are rows, range-checked) or
            ``"index"`` (raw ids get rows). The other fields are None, or empty, where they have no meaning.
        rows: physical rows.
        dense_rows: ids below are their own row.
        buckets: pieces that the other rows are cut into.
        on_full: what a new id gets whose bucket is full.
        evict: who goes; ``""`` where nobody does.
        admit_after: sightings before an id gets a row.
        unseen: what an id without a row reads in eval mode, or before it is admitted.
        seed: of buckets, shared rows and initial rows.
        ids_held: ids that have a row in the index; None on meta.
        occupancy: share of the index's rows that are taken.
        worst_bucket: number of the fullest bucket.
        worst_bucket_occupancy: share of that bucket's rows that are taken.
        counters: (name, count), what has happened so far; see :attr:`HashIndex.counters`.
        candidates: ids that were seen but not admitted; None with ``admit_after=1``.
        longest_probe: slots that the slowest lookup looks at.
        index_bytes: of the index, without the weight.
        usable_share: the share of the index's rows expected to be taken when the first id meets a full bucket.
        room: new ids that are expected to fit before one meets a full bucket.
        batches_until_full: batches until then at the mean pace so far: a lower estimate where fewer and fewer ids are
            new, an upper one where more and more are. None before training, and with ``on_full="evict"``.
        suggested_rows: for ``HashConfig.rows``, with the buckets that it has; None where nothing asks for more.
        rows_here: rows of the index that all this is said of: the table's, or those of a rank's slice of a table whose
            rows are cut. None on meta, and where this rank has none.
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
        rows: physical rows.
        dim: columns.
        pooling: ``"SUM"`` or ``"MEAN"``; ``""`` where the collection does not pool.
        dtype: of the weight.
        device: of the weight; ``""`` where the collection does not show it.
        bytes: of the weight.
        hashing: None in a collection that was not converted.
        kernel: the backend that serves its lookup; ``""`` in a collection that was not converted.
        kernels_passed_over: the backends that come before it, and why they were not taken.
        optimizer: what steps it: ``"none: gradients to weight.grad"``, ``"fused <rule>"``, or
            ``"in backward, not fused: <reason>"``.
        custom_init_fn: whether it brings an ``init_fn`` of its own, which new rows take their values from.
        reasons: those of the report's reasons that are about this table.
        sharding: where its parts are; None where it is not sharded. ``rows``, ``dim`` and ``bytes`` are the whole
            table's, ``device``, ``kernel`` and ``optimizer`` those of this rank's part, ``""`` where it has none.
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
