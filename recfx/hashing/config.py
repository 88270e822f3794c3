"""The settings with which a user can configure the hashing of a table."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Literal, SupportsIndex, TypeAlias, get_args

from torch import Tensor

from recfx.errors import ConversionError, plural
from recfx.kernels.index.index_buffers import IndexPolicy

# Every language that computes bucket borders multiplies a number of buckets by a number of rows in an int64.
MOST_ROWS = 2**40
MOST_BUCKETS = 2**20
MOST_TTL = 2**36 - 1  # batches, as many as an index counts

_ROWS_PER_DEFAULT_BUCKET = 4096
_MOST_DEFAULT_BUCKETS = 64

OnFull: TypeAlias = Literal["error", "share", "evict"]
Evict: TypeAlias = Literal["lru", "lfu", "ttl"]
Unseen: TypeAlias = Literal["zeros", "share", "row"]

_ON_FULL, _UNSEEN = get_args(OnFull), get_args(Unseen)
_CHOICES = {"on_full": _ON_FULL, "evict": get_args(Evict), "unseen": _UNSEEN}
_LIMITS = {
    "rows": (1, MOST_ROWS),
    "dense_rows": (0, MOST_ROWS),
    "buckets": (1, MOST_BUCKETS),
    "admit_after": (1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 2),  # seed + 1, which chooses shared rows, must not overflow
    "ttl_batches": (1, MOST_TTL),
}


@dataclass(frozen=True)
class HashConfig:
    """How a table turns raw 64-bit ids into rows. ``None`` means that it depends on the table.

    Example:
        >>> raw = recfx.HashConfig.raw_ids(on_full="evict", evict="lfu")  # any int64 is a legal id
        >>> grown = recfx.HashConfig(rows=1000)  # ids below the table's rows keep them; others get those that are added
        >>> model = recfx.convert(Model(), hashing={"users": grown})
        >>> model.ebc.weight("users").shape
        torch.Size([1000, 8])

    Args:
        rows: the number of physical rows; default: as many as the table has. If there are more, new rows follow the
            existing ones.
        dense_rows: an id ``0 <= id < dense_rows`` is its own row and never touches the index. The default in
            ``recfx.convert`` is the number of rows of the table (so there is no index: a trained table is adopted
            unchanged); in a ``HashIndex`` that is built directly it is 0.
        buckets: how many buckets the rows from ``dense_rows`` on are divided into. The hash of an id decides which
            bucket it belongs to, whatever the world size is, and the id takes a row in that bucket. Default: the
            largest power of two from 1 to 64 with at least 4096 rows per bucket.
        on_full: what happens to a new id whose bucket has no free row: ``"error"``, ``"share"`` (it reads and trains a
            row of its bucket chosen by its hash, the hashing trick) or ``"evict"`` (it gets the row of another id,
            which is forgotten, with what optimizers know of it; ``evict_needs_fused_optimizer`` if one cannot).
        evict: which id loses its row with ``on_full="evict"``: ``"lru"``, the least recently used one, or ``"lfu"``,
            the one with the fewest sightings; ties go to the lowest ``mix64(id)``. Ids of batches whose backward has
            not run yet keep their rows, for as many later forwards as the collection's ``batches_in_flight`` says.
            ``"ttl"`` (time to live) is ``"lru"``, and ids that ``ttl_batches`` batches have not seen expire.
        ttl_batches: for ``evict="ttl"``, and needed there. When a training batch begins, every id that none of the last
            ``ttl_batches`` training batches had loses its row, as if it had been evicted: it reads the ``unseen``
            answer, and if it returns, it is a new id. A batch is a training forward of the table's collection, whether
            or not it has ids of the table, or a call of ``HashIndex.insert``. Nothing expires in eval mode or in
            exported files.
        admit_after: how many sightings (occurrences, counted for the whole batch first) an id needs to get a row. Until
            then it reads the ``unseen`` answer and trains nothing. A bucket counts as many such ids as it has rows, and
            then forgets the oldest.
        unseen: what an id without a row reads in eval mode, or before it is admitted: ``"zeros"``, ``"share"`` (the row
            that its hash chooses), or ``"row"``: the last row of its bucket, which then belongs to no id (with
            ``buckets=1``, one row of the table). With ``on_full="share"``, ids of a full bucket read and train it too.
        seed: for buckets, sharing and initial rows; any int64 except the highest. Whoever knows it can choose ids that
            fill one bucket; where ids may be hostile, give a random one (``secrets.randbits(62)``), the same on all
            ranks (drawn once: ``torch.distributed.broadcast_object_list``) and after a resume, and keep it secret:
            states, checkpoints and exported files contain it.

    Raises:
        ConversionError: ``invalid_hash_config``, naming field and value.
    """

    rows: int | None = None
    dense_rows: int | None = None
    buckets: int | None = None
    on_full: OnFull = "error"
    evict: Evict = "lru"
    admit_after: int = 1
    unseen: Unseen = "zeros"
    seed: int = 0
    ttl_batches: int | None = None

    def __repr__(self) -> str:
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return f"HashConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def __post_init__(self) -> None:
        for field, (lowest, highest) in _LIMITS.items():
            _check_integer(field, getattr(self, field), lowest, highest, optional=field not in ("admit_after", "seed"))
            object.__setattr__(self, field, as_integer(getattr(self, field)))  # NumPy integers too
        for field, choices in _CHOICES.items():
            if not isinstance(chosen := getattr(self, field), str | None) or chosen not in choices:
                raise _invalid(field, chosen, f"one of {', '.join(map(repr, choices))}", "")
        self._check_ttl()
        if self.rows is not None and self.dense_rows is not None:
            _check_dense_rows(self.dense_rows, self.rows, "")

    @classmethod
    def raw_ids(
        cls,
        *,
        rows: int | None = None,
        buckets: int | None = None,
        on_full: OnFull = "error",
        evict: Evict = "lru",
        admit_after: int = 1,
        unseen: Unseen = "zeros",
        seed: int = 0,
        ttl_batches: int | None = None,
    ) -> HashConfig:
        """For raw 64-bit ids: any int64 is a legal id, and each gets a row when it is first seen (``dense_rows=0``).

        Example:
            >>> recfx.HashConfig.raw_ids(on_full="share").dense_rows
            0

        The arguments are the other settings of ``HashConfig``.

        Raises:
            ConversionError: ``invalid_hash_config``, naming field and value.
        """
        return cls(rows, 0, buckets, on_full, evict, admit_after, unseen, seed, ttl_batches)

    def _check_ttl(self) -> None:
        if self.evict == "ttl" and self.on_full != "evict":
            needed = "'evict' if evict='ttl'"
            if self.ttl_batches is None:
                needed += ", which needs ttl_batches as well, a number of batches"
            raise _invalid("on_full", self.on_full, needed, "")
        if (self.evict == "ttl") != (self.ttl_batches is not None):
            raise _invalid("ttl_batches", self.ttl_batches, "given if, and only if, evict='ttl'", "")

    def resolve(self, table_rows: int, adopt: bool, name: str = "") -> ResolvedHashConfig:
        """Fill in every number for one table.

        Example:
            >>> recfx.HashConfig.raw_ids().resolve(1_000_000, adopt=True).buckets
            64

        Args:
            table_rows: the number of rows that the table has.
            adopt: True for a table that already exists (``recfx.convert``): it keeps its rows, and by default all of
                them are dense. False for an index that is built directly: by default no row is dense.
            name: the name of the table, for messages.

        Raises:
            ConversionError: ``rows_shrink`` if ``adopt`` and ``rows`` is less than the table has;
                ``invalid_hash_config`` if the numbers do not fit this table.
        """
        if adopt and table_rows == 0:
            raise ConversionError(
                "the table has no rows, so none of its ids could be served.",
                reason="invalid_hash_config",
                module_path=name,
                what_to_do=f"give it rows, or keep it as it is with hashing={{{name!r}: None}}.",
            )
        _check_integer("rows", table_rows, 1, MOST_ROWS, name=name)
        table_rows = int(table_rows)
        rows = table_rows if self.rows is None else self.rows
        if adopt and rows < table_rows:
            raise ConversionError(
                f"HashConfig.rows is {rows}, but the table already has {table_rows} rows.",
                reason="rows_shrink",
                module_path=name,
                what_to_do=f"Leave rows out, or give at least {table_rows}.",
            )
        dense_rows = self.dense_rows
        if dense_rows is None:
            dense_rows = table_rows if adopt else 0
        _check_dense_rows(dense_rows, rows, name)
        index_rows = rows - dense_rows
        buckets = _default_buckets(index_rows) if self.buckets is None else self.buckets
        least = 2 if self.unseen == "row" else 1  # the last row of a bucket belongs to no id then
        if 0 < index_rows < least * buckets:
            each = "one row" if least == 1 else "two rows, because unseen='row' keeps one,"
            most = f"{index_rows // least}: each bucket needs {each} of the {plural(index_rows, 'row')} of the index"
            expected = f"at most {most}; or rows {dense_rows + least * buckets} or more"
            raise _invalid("buckets", buckets, expected, name)
        return ResolvedHashConfig(**vars(self) | {"rows": rows, "dense_rows": dense_rows, "buckets": buckets})


@dataclass(frozen=True)
class ResolvedHashConfig:
    """A ``HashConfig`` for one table, with all defaults filled in. Made by ``HashConfig.resolve``."""

    rows: int
    dense_rows: int
    buckets: int
    on_full: OnFull
    evict: Evict
    admit_after: int
    unseen: Unseen
    seed: int
    ttl_batches: int | None = None

    @property
    def index_rows(self) -> int:
        return self.rows - self.dense_rows

    @property
    def evicts(self) -> bool:
        """Whether new ids may take the rows of other ids."""
        return self.on_full == "evict"

    @property
    def admits(self) -> bool:
        """Whether ids are counted before they get a row."""
        return self.admit_after > 1

    @property
    def share_buckets(self) -> int:
        """What ids without a row read, as ``IndexView`` has it."""
        return {"zeros": 0, "share": self.buckets, "row": -self.buckets}[self.unseen]

    @property
    def policy(self) -> IndexPolicy:
        """The policy for the operators, for an index of the whole table."""
        return IndexPolicy(
            dense_rows=self.dense_rows, seed=self.seed, on_full=_ON_FULL.index(self.on_full),
            evict=int(self.evict == "lfu"), admit_after=self.admit_after, unseen=_UNSEEN.index(self.unseen),
            rows=self.rows, buckets=self.buckets, row_begin=0, row_end=self.rows,
            ttl_batches=(self.ttl_batches or 0) if self.evicts else 0,
        )  # fmt: skip

    @property
    def has_index(self) -> bool:
        """Whether there is an index. If not, every row is dense, and ids are only range-checked."""
        return self.index_rows > 0


def checked_arguments(
    rows: int, config: HashConfig | ResolvedHashConfig, name: str, row_begin: int, row_end: int | None
) -> tuple[ResolvedHashConfig, IndexPolicy]:
    """The configuration for the table, and its form for the operators, for the slice that the index holds.

    Raises:
        ConversionError: ``invalid_hash_config``.
    """
    resolved = config if isinstance(config, ResolvedHashConfig) else config.resolve(rows, False, name)
    if resolved.rows != rows:
        raise _invalid("rows", resolved.rows, f"left out, or the {rows} rows of the index", name)
    if not resolved.has_index:
        raise _invalid("dense_rows", resolved.dense_rows, "less than rows (0 for raw ids), or nothing is indexed", name)
    begin, end = as_integer(row_begin), resolved.rows if row_end is None else as_integer(row_end)
    policy = resolved.policy
    if begin is not None and end is not None and 0 <= begin < end <= policy.rows:
        policy = policy._replace(row_begin=begin, row_end=end)
        if all(map(policy.may_be_border, (begin, end))):
            return resolved, policy
    raise ConversionError(
        f"row_begin={row_begin!r} and row_end={row_end!r} are not the borders of a slice of a table of {policy.rows} "
        f"rows, {policy.dense_rows} of them dense, with {policy.buckets} buckets.",
        reason="invalid_hash_config",
        module_path=name,
        what_to_do="A slice has at least one row, and its borders are among the dense rows or where a bucket begins; "
        "recfx.hashing.slices.row_cuts returns such borders.",
    )


def _default_buckets(index_rows: int) -> int:
    buckets = 1
    while buckets < _MOST_DEFAULT_BUCKETS and index_rows // (2 * buckets) >= _ROWS_PER_DEFAULT_BUCKET:
        buckets *= 2
    return buckets


def _check_dense_rows(dense_rows: int, rows: int, name: str) -> None:
    if dense_rows > rows:
        raise _invalid("dense_rows", dense_rows, f"at most {rows}, the rows of the table", name)


def as_integer(value: object) -> int | None:
    """``value`` as a Python integer; None for anything that is not an integer, including ``True`` and tensors."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, Tensor)) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a NumPy array
        return None


def _check_integer(
    field: str, value: object, lowest: int, highest: int, *, optional: bool = False, name: str = ""
) -> None:
    if optional and value is None:
        return
    number = as_integer(value)
    if number is None or not lowest <= number <= highest:
        raise _invalid(field, value, f"an integer from {lowest} to {highest}{' or None' if optional else ''}", name)


def _invalid(field: str, value: object, expected: str, name: str) -> ConversionError:
    return ConversionError(
        f"HashConfig.{field} is {value!r}.",
        reason="invalid_hash_config",
        module_path=name,
        what_to_do=f"{field} must be {expected}.",
    )
