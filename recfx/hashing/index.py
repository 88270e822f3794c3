"""``HashIndex``: from raw 64-bit ids to the rows of one table."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recfx.errors import ConversionError, IdTypeError, InputError, TableFullError
from recfx.hashing.config import HashConfig, ResolvedHashConfig
from recfx.hashing.storage import COUNTERS, IndexStorage
from recfx.kernels import hash_index

_DEFAULT_CONFIG = HashConfig()


class Occupancy(NamedTuple):
    """How full an index is. Dense rows are not counted."""

    taken: int
    rows: int
    worst_bucket: int
    worst_bucket_taken: int
    worst_bucket_rows: int


class HashIndex(IndexStorage):
    """Gives rows of a table to raw 64-bit ids. Any int64 is a legal id.

    Ids come as int64 or int32 ``[n]`` on any device, rows go out as int64 ``[n]`` on that device. The index itself
    always lives on the CPU: ``.to()`` and ``.half()`` leave it where it is. On the meta device it holds nothing;
    ``to_empty`` turns it into an empty index. State: ``row_ids`` int64 ``[rows]`` (-1 where free) and ``row_state``
    uint8 ``[rows]`` (0 free, 1 taken) are in the ``state_dict``; everything else is rebuilt from them.

    Not for several threads at once, unless all of them only call ``find``.

    Args:
        rows: rows of the table.
        config: with ``dense_rows=None`` standing for 0 here; or the resolved form for this table.
        name: of the table, for messages.
        device: only ``"meta"`` (also as torch's default device) makes a difference.

    Raises:
        ConversionError: ``invalid_hash_config`` (among others: all rows are dense, so there is nothing to index),
            ``evict_not_available``, ``admission_not_available``.
    """

    def __init__(
        self,
        rows: int,
        *,
        config: HashConfig | ResolvedHashConfig = _DEFAULT_CONFIG,
        name: str = "table",
        device: torch.device | str | None = None,
    ) -> None:
        resolved = config if isinstance(config, ResolvedHashConfig) else config.resolve(rows, False, name)
        _check_supported(resolved, rows, name)
        super().__init__(resolved, name, device)

    # Looking up and inserting

    def find(self, ids: Tensor) -> Tensor:
        """The row of each id, -1 where it has none. Changes and counts nothing."""
        self._check_ids(ids)
        if self._is_meta(ids):
            return torch.empty_like(ids, dtype=torch.int64)
        cpu_ids = ids.to("cpu", torch.int64)
        return hash_index.find(cpu_ids, self.slots, self.side_row, self.config.dense_rows).to(ids.device)

    def find_or_insert(self, ids: Tensor) -> Tensor:
        """The row of each id; new ids get one. The same as ``insert(ids)[0]``."""
        return self.insert(ids)[0]

    def insert(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each id, and which rows are new.

        New ids get rows in order of first appearance, each the lowest free row of its bucket. Where the bucket is
        full, ``config.on_full`` decides.

        Returns:
            rows: int64 ``[n]``.
            new_rows: int64, the rows just given out, in that order; their ids are ``row_ids[new_rows]``.

        Raises:
            TableFullError: ``table_full``, with ``on_full="error"``. The index is as it was.
        """
        self._check_ids(ids)
        if self._is_meta(ids):
            return torch.empty_like(ids, dtype=torch.int64), ids.new_empty(0, dtype=torch.int64)
        return self._insert(ids, ids.numel())

    def insert_absent(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``insert(ids)`` for who has just had ``rows = find(ids)``: only ids without a row are looked up again.

        Returns:
            rows: int64 ``[n]``; new_rows: as for ``insert``.

        Raises:
            TableFullError: as for ``insert``.
        """
        absent = torch.nonzero(rows < 0).squeeze(1)
        found, new_rows = self._insert(ids[absent], ids.numel())
        return rows.index_copy(0, absent, found), new_rows

    def _insert(self, ids: Tensor, seen: int) -> tuple[Tensor, Tensor]:
        rows, new_rows, status = hash_index.find_or_insert(
            ids.to("cpu", torch.int64),
            self.index_buffers(),
            self.config.dense_rows,
            self.config.seed,
            self.config.on_full == "share",
        )
        full_bucket, shared = status.tolist()
        if full_bucket >= 0:
            raise self._full_error(full_bucket)
        self._count(seen, new_rows.numel(), shared, 0)
        return rows.to(ids.device), new_rows.to(ids.device)

    def undo(self, new_rows: Tensor) -> None:
        """Take back the rows that the last ``insert`` gave out: the mapping is as before, and so is ``inserted``.

        Raises:
            InputError: ``row_not_taken``, if one of them is free. Nothing is taken back then.
        """
        if self._is_meta(new_rows) or new_rows.numel() == 0:
            return
        cpu_rows = new_rows.cpu()
        if bool((self.row_state[cpu_rows] != 1).any()):
            raise InputError(
                "A row to take back is free.",
                reason="row_not_taken",
                module_path=self.name,
                what_to_do="Pass the new_rows of the last insert, once.",
            )
        freed = self._erase(self.row_ids[cpu_rows]) >= 0
        self._count(0, -int(freed.sum()), 0, 0)

    def answer(self, ids: Tensor) -> Tensor:
        """What eval mode reads: the row of each id; where it has none, what ``config.unseen`` says. Inserts nothing.

        Returns:
            int64 ``[n]``; with ``unseen="zeros"`` -1 where there is no row, with ``"share"`` a row of the id's bucket.
        """
        rows = self.find(ids)
        return rows if self._is_meta(ids) else self.answer_absent(ids, rows)

    def answer_absent(self, ids: Tensor, rows: Tensor) -> Tensor:
        """``answer(ids)`` for who has just had ``rows = find(ids)``."""
        absent = rows < 0
        if self.config.unseen == "share":
            rows = torch.where(absent, self.shared_rows(ids.to(torch.int64)), rows)
        self.counts[0] += ids.numel()
        self.counts[2 if self.config.unseen == "share" else 3] += absent.sum().to("cpu")
        return rows

    def note_seen(self, count: int) -> None:
        """Count ids that a caller looked up in the slot table by itself, and found."""
        self.counts[0] += count

    def erase(self, ids: Tensor) -> Tensor:
        """Forget these ids and free their rows. Ids without a row and dense ids are left alone.

        Returns:
            int64 ``[n]``: the row that each id had, -1 where it had none, or stands in ``ids`` before.
        """
        self._check_ids(ids)
        if self._is_meta(ids):
            return torch.empty_like(ids, dtype=torch.int64)
        return self._erase(ids.to("cpu", torch.int64)).to(ids.device)

    def shared_rows(self, ids: Tensor) -> Tensor:
        """The row that each id (int64 ``[n]``) shares where it has none of its own: one of its bucket, by its hash."""
        config = self.config
        return hash_index.shared_rows(ids, config.rows, config.dense_rows, config.buckets, config.seed)

    # What is in it

    def items(self) -> tuple[Tensor, Tensor]:
        """All ids and their rows, int64, on the CPU, sorted by row. Dense ids are not listed."""
        rows = torch.nonzero(self.row_state).squeeze(1)
        return self.row_ids[rows], rows

    def __len__(self) -> int:
        return int(self.bucket_taken.sum())

    def __bool__(self) -> bool:
        return True  # a module is one even when it holds no id: `if module:` must not skip an empty index

    @property
    def counters(self) -> dict[str, int]:
        """Since the index was built: ``ids_seen``, ``inserted``, ``shared_answers``, ``unseen_answers``."""
        return dict(zip(COUNTERS, self.counts.tolist(), strict=True))

    def occupancy(self) -> Occupancy:
        """Rows taken and to be had, in all and in the fullest bucket (the first of these, if there are several)."""
        taken = self.bucket_taken.tolist()
        worst = max(range(len(taken)), key=lambda bucket: taken[bucket] / self.bucket_rows(bucket))
        return Occupancy(sum(taken), self.config.index_rows, worst, taken[worst], self.bucket_rows(worst))

    def bucket_rows(self, bucket: int) -> int:
        """Rows of one bucket."""
        begin, end = (
            hash_index.bucket_begin(b, self.config.rows, self.config.dense_rows, self.config.buckets)
            for b in (bucket, bucket + 1)
        )
        return end - begin

    def slot_table(self) -> tuple[Tensor, Tensor]:
        """The slot table int64 ``[slots, 2]`` of (id, row), and the row of id -1, int64 ``[1]``: views, not copies.

        ``fbgemm::pruned_hashmap_lookup`` can read the first; see ``recfx/kernels/slot_table.py``.
        """
        return self.slots, self.side_row

    def extra_repr(self) -> str:
        config = self.config
        return f"{config.rows}, name={self.name!r}, dense_rows={config.dense_rows}, buckets={config.buckets}"

    # Details

    def _check_ids(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor):
            raise IdTypeError(
                f"Ids must be a tensor, got {type(ids).__name__}.",
                reason="wrong_id_dtype",
                module_path=self.name,
                what_to_do="pass torch.tensor(ids, dtype=torch.int64).",
            )
        if ids.dtype not in (torch.int64, torch.int32):
            raise IdTypeError(
                f"Ids must be int64 or int32, got {ids.dtype}.",
                reason="wrong_id_dtype",
                module_path=self.name,
                what_to_do="convert them with .to(torch.int64).",
            )
        if ids.dim() != 1:
            raise InputError(
                f"Ids must be [n], got {list(ids.shape)}.",
                reason="wrong_id_shape",
                module_path=self.name,
                what_to_do="flatten them with .view(-1).",
            )

    def _is_meta(self, ids: Tensor) -> bool:
        return ids.is_meta or self.slots.is_meta

    def _erase(self, ids: Tensor) -> Tensor:
        return hash_index.erase(ids, self.index_buffers(), self.config.dense_rows, self.config.seed)

    def _count(self, *amounts: int) -> None:
        self.counts += torch.tensor(amounts, device="cpu")  # whatever the default device is

    def _full_error(self, bucket: int) -> TableFullError:
        capacity = self.bucket_rows(bucket)
        return TableFullError(
            f"bucket {bucket} of {self.config.buckets} of table {self.name!r} is full: all its {capacity} rows are "
            f"taken ({len(self)} of the table's {self.config.index_rows} rows, and new ids of this batch).",
            reason="table_full",
            module_path=self.name,
            what_to_do="Give the table more rows (HashConfig.rows), or set on_full='share'.",
        )


def _check_supported(config: ResolvedHashConfig, rows: int, name: str) -> None:
    if config.rows != rows:
        raise ConversionError(
            f"HashConfig.rows is {config.rows}, but the index is built with {rows} rows.",
            reason="invalid_hash_config",
            module_path=name,
            what_to_do="Give the number of rows once.",
        )
    if not config.has_index:
        raise ConversionError(
            f"HashConfig.dense_rows is {config.dense_rows}, all rows of the table: there is nothing to index.",
            reason="invalid_hash_config",
            module_path=name,
            what_to_do="Give fewer dense_rows (0 for raw ids), or more rows.",
        )
    if config.on_full == "evict":
        raise ConversionError(
            "Eviction is not available yet.",
            reason="evict_not_available",
            module_path=name,
            what_to_do="Use on_full='error' or on_full='share'.",
        )
    if config.admit_after > 1:
        raise ConversionError(
            f"Admission after {config.admit_after} sightings is not available yet.",
            reason="admission_not_available",
            module_path=name,
            what_to_do="Use admit_after=1.",
        )
