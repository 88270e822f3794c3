"""The report as data: frozen, complete, versioned. Text, JSON, HTML and pictures are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import sympy
import torch

from recfx.errors import Diagnostic, below_current, plural, printable
from recfx.hashing import HashIndex, ResolvedHashConfig
from recfx.hashing.storage import EVAL_COUNTERS
from recfx.ir.meta import NodeMeta
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.kernels.index.index_buffers import COUNTERS
from recfx.models.conversion_record import Conversion
from recfx.planner.pricing.work import expression

DENSE = "none: gradients to weight.grad"
"""What updates a table of which an optimizer that the user steps reads a dense gradient."""


@dataclass(frozen=True)
class ShardReport:
    """A rectangle of a table on one rank: first rows and columns, and those after the last; ``bytes`` of weights."""

    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    bytes: int


@dataclass(frozen=True)
class ShardingReport:
    """One table on several ranks, as one of them sees it.

    ``group`` is how its pooled rows are sent: ``"table_wise"`` (all-to-all), ``"row_wise"`` (sums over all ranks),
    ``"table_row_wise"`` (sums within a host, then all-to-all across hosts) or ``"data_parallel"`` (not at all).
    """

    sharding_type: str  # one of TorchRec's
    compute_kernel: str  # "fused" or "dense"
    group: str
    travels: str  # the same in words, and in which precision, if they are quantized
    is_replicated: bool  # whether every rank has all of the table
    rank: int
    world_size: int
    shards: tuple[ShardReport, ...]  # of all ranks, by columns, then by rows
    rows_here: int  # of which this rank has some columns
    columns_here: int  # that it has of these rows
    bytes_here: int  # of this rank's weights

    @classmethod
    def of(cls, table: ShardedTable, sharding: CollectionSharding, element_bytes: int) -> ShardingReport:
        """One table of ``sharding``; ``element_bytes`` is the size of one weight."""
        shards = tuple(
            ShardReport(shard.rank, shard.rows, shard.columns, shard.num_rows * shard.num_columns * element_bytes)
            for shard in table.shards
        )
        here = [shard for shard in shards if shard.rank == sharding.rank and shard.bytes]
        wires = dict.fromkeys(str(wire) for wire in table.way_back.wires_of(sharding.wires) if wire is not None)
        return cls(
            sharding_type=table.type.name, compute_kernel=table.compute_kernel, group=table.way_back.name,
            travels=", ".join([table.way_back.wording, *wires]), is_replicated=table.is_replicated,
            rank=sharding.rank, world_size=sharding.world_size, shards=shards,
            rows_here=max((shard.rows[1] - shard.rows[0] for shard in here), default=0),
            columns_here=sum(shard.columns[1] - shard.columns[0] for shard in here),
            bytes_here=sum(shard.bytes for shard in here),
        )  # fmt: skip


@dataclass(frozen=True)
class HashingReport:
    """How the ids of a table become rows: ``mode`` is ``"static"`` (ids are rows, as in the standard collection),
    ``"adopted"`` (ids are rows, range-checked) or ``"index"`` (raw ids get rows).

    The other fields are None, or empty, if they have no meaning; those from ``ids_held`` on also if the index is on
    meta. They are about ``rows_here``: on a rank with a slice of a table, about that slice.
    """

    mode: str
    rows: int | None = None  # physical rows
    dense_rows: int | None = None  # ids below this number are their own row
    buckets: int | None = None  # that the other rows are divided into
    on_full: str = ""  # what happens to a new id whose bucket is full
    evict: str = ""  # which id is evicted; "" if ids are not evicted
    ttl_batches: int | None = None  # without a sighting, after which ids expire; None if they do not
    admit_after: int | None = None  # sightings before an id gets a row
    unseen: str = ""  # what an id without a row reads in eval mode, or before it is admitted
    seed: int | None = None  # of buckets, shared rows and initial rows
    ids_held: int | None = None  # ids that have a row in the index
    index_rows: int | None = None  # rows that the index gives out
    occupancy: float | None = None  # share of these that are taken
    worst_bucket: int | None = None  # number of the fullest bucket
    worst_bucket_occupancy: float | None = None  # share of that bucket's rows that are taken
    full_bucket: int | None = None  # the bucket that has stopped training, if no batch was trained since
    counters: Mapping[str, int] = field(default_factory=dict)  # so far; see HashIndex.counters
    trained: Mapping[str, int] = field(default_factory=dict)  # the same in training alone
    evaluated: Mapping[str, int] = field(default_factory=dict)  # ids seen, and those without a row, in eval mode
    candidates: int | None = None  # ids that were seen but not admitted; None with admit_after=1
    longest_probe: int | None = None  # slot groups (cache lines) that the slowest lookup reads
    index_bytes: int | None = None  # size of the index, without the weight
    rows_here: int | None = None  # rows of the table that the index covers

    @classmethod
    def of(cls, config: ResolvedHashConfig | None, index: HashIndex | None = None) -> HashingReport:
        """What the settings of a table say, and what its index holds; without one, or on meta, the settings alone."""
        if config is None:
            return cls("static")
        if not config.has_index:
            return cls("adopted", rows=config.rows, dense_rows=config.dense_rows)
        names = ["rows", "dense_rows", "buckets", "on_full", "admit_after", "unseen", "seed"]
        names += ["evict", "ttl_batches"] if config.evicts else []
        settings = cls("index", **{name: getattr(config, name) for name in names})
        return settings if index is None or index.bucket_taken.is_meta else settings._with(index)

    def _with(self, index: HashIndex) -> HashingReport:
        config, policy, buffers, occupancy = index.config, index.policy, index.index_buffers(), index.occupancy()
        counters, trained = index.counters, dict(zip(COUNTERS, buffers.counts.tolist(), strict=True))
        full = index.full_at
        is_full = full is not None and full[:2] == (index.adopted.times, trained["batches"])
        return replace(
            self, ids_held=occupancy.taken, index_rows=occupancy.rows,
            occupancy=occupancy.taken / max(occupancy.rows, 1),
            worst_bucket=occupancy.worst_bucket if policy.own_buckets else None,
            worst_bucket_occupancy=occupancy.worst_bucket_taken / max(occupancy.worst_bucket_rows, 1),
            full_bucket=full[2] if full is not None and is_full else None, counters=counters, trained=trained,
            evaluated=dict(zip(EVAL_COUNTERS, index.fold_eval_counts().tolist(), strict=True)),
            candidates=int(torch.count_nonzero(buffers.candidate_counts)) if config.admits else None,
            longest_probe=index.longest_probe(),
            index_bytes=sum(tensor.numel() * tensor.element_size() for tensor in buffers), rows_here=policy.own_rows,
        )  # fmt: skip


@dataclass(frozen=True, repr=False)
class TableReport:
    """One table. If it is sharded, ``rows``, ``dim`` and ``bytes`` are those of the whole table; ``device``, ``kernel``
    and ``optimizer`` are those of this rank's part, ``""`` if it has no part.
    """

    name: str  # as in its config
    features: tuple[str, ...]  # keys of the batch that read it
    embedding_names: tuple[str, ...]  # their keys in the output
    rows: int  # physical rows
    dim: int  # columns
    pooling: str  # "SUM" or "MEAN"; "" if the collection does not pool
    dtype: str  # of the weight, as are the next two
    device: str  # "" if the collection does not show it
    bytes: int
    hashing: HashingReport | None = None  # None in a collection that was not converted
    kernel: str = ""  # the backend that serves its lookup; "" in a collection that was not converted
    kernels_passed_over: tuple[Diagnostic, ...] = ()  # the backends that come before it, and why they were not taken
    optimizer: str = ""  # "none: gradients to weight.grad", "fused <rule>", or "in backward, not fused: <reason>"
    custom_init_fn: bool = False  # whether it has its own init_fn, which fills new rows
    reasons: tuple[Diagnostic, ...] = ()  # the report's reasons that are about this table
    sharding: ShardingReport | None = None  # where its parts are; None if it is not sharded

    def __repr__(self) -> str:
        hashing = "" if self.hashing is None else f", {self.hashing.mode}"
        return f"TableReport({self.name!r}, {self.rows:,} rows of {self.dim} {self.dtype}{hashing})"

    @property
    def has_dense_gradient(self) -> bool:
        """Whether backward writes a gradient as large as its part here."""
        return self.optimizer == DENSE

    @property
    def bytes_here(self) -> int:
        """The size of this rank's part of the weight."""
        return self.bytes if self.sharding is None else self.sharding.bytes_here


@dataclass(frozen=True)
class NodeReport:
    """One node of a collection's graph: see :class:`recfx.ir.NodeMeta`. ``shape`` and ``bytes`` are symbolic."""

    name: str
    kind: str
    tables: tuple[str, ...]
    made_by: str
    shape: tuple[sympy.Expr, ...]
    dtype: str
    bytes: sympy.Expr
    device: str
    kernel: str

    @classmethod
    def of(cls, name: str, meta: NodeMeta) -> NodeReport:
        """The node of this name."""
        dtype = "" if meta.dtype is None else type_name(meta.dtype)
        return cls(name, meta.kind, meta.tables, meta.made_by, meta.shape, dtype, meta.bytes, meta.device, meta.kernel)


@dataclass(frozen=True, repr=False)
class CollectionReport:
    """One collection. ``status`` is ``"converted"``, ``"convertible"`` (before conversion), ``"kept"`` or
    ``"refused"``. ``found`` is ``"traced"`` (a call of it was seen), ``"walked"`` (calls were not traced, or could not
    be), or ``"never called"``.
    """

    paths: tuple[str, ...]  # every fully qualified name it has; "" is the root
    kind: str  # name of its class before conversion
    status: str
    why: Diagnostic | None = None  # it is kept or refused
    found: str = "walked"
    file: str = ""  # where the user's code calls it, or where the class that holds it is defined
    line: int = 0  # 0 if unknown
    is_weighted: bool | None = None  # whether batches carry per-id weights; None if the collection does not say
    device: str = ""  # as the collection states it
    tables: tuple[TableReport, ...] = ()
    nodes: tuple[NodeReport, ...] = ()  # of the final graph
    graph: str = ""  # the final graph as text; "" if it is not converted
    declined: tuple[Diagnostic, ...] = ()  # what passes and backends did not do, and why
    reasons: tuple[Diagnostic, ...] = ()  # those of the report's that are about it or its tables

    def __repr__(self) -> str:
        return f"CollectionReport({self.path!r}, {self.kind}, {self.status}, {plural(len(self.tables), 'table')})"

    @property
    def path(self) -> str:
        """The first name."""
        return self.paths[0]

    @property
    def reason(self) -> str:
        """Reason code if it is kept or refused; otherwise ``""``."""
        return "" if self.why is None else self.why.code


@dataclass(frozen=True)
class Verification:
    """What the conversion compared: if no comparison was run, ``ok`` is None and ``text`` says why."""

    ok: bool | None
    text: str

    @classmethod
    def of(cls, conversion: Conversion) -> Verification:
        """What a conversion has compared, if it did; that nothing could be compared is no difference."""
        comparison = conversion.verification
        assert comparison is not None
        return cls(comparison.ok if comparison.ok or comparison.of("different") else None, str(comparison))


def type_name(dtype: object) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def name_of(path: str) -> str:
    """A fully qualified name, or a word for the root, whose name is empty."""
    return printable(path) or "(root)"


def place_of(name: str, line: int) -> str:
    """``file:line``, without well-known folders."""
    file = Path(name)
    if "site-packages" in file.parts:
        file = Path(*file.parts[file.parts.index("site-packages") + 1 :])
    return f"{below_current(file)}:{line}"


def shape_text(sizes: tuple[sympy.Expr, ...]) -> str:
    """``[B, 16]``."""
    return f"[{', '.join(expression(value) for value in sizes)}]"
