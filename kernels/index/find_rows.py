"""Finding ids in indexes that are only read, where the ids are: the form of the indexes, and what a target has to do.

A target of the family ``find_rows`` is a module with ``find_rows(ids, table_ends, indexes) -> (rows, absent)``:
``find_rows_op.py`` launches the kernel in ``find_rows_triton.py``; ``find_rows_reference.py`` is in ATen.

Args of ``find_rows``:
    ids: int64 ``[n]``, any values, ordered by table.
    table_ends: int64 ``[tables]``, where the ids of each table end; the last one is ``n``.
    indexes: a ``ReadIndexes`` on the device of the ids.

It returns, without waiting for the device:
    rows: int64 ``[n]``: the row of each id. An id that has none reads the row that it shares, if its table's ids
        share rows, and is -1 otherwise. Ids of a table without an index are rows already.
    absent: int64 ``[tables]``, how many ids of each table have no row of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from recfx.kernels.index.index_buffers import IndexView
from recfx.kernels.index.mix64 import mix64_integer


class IndexFacts(NamedTuple):
    """What the kernel has to know of one index: a row of ``ReadIndexes.facts``, in the order of its constants."""

    slots_start: int  # elements of `slots` before those of the table
    slot_mask: int  # the number of the table's slots - 1; -1 if it has no index
    side_start: int  # elements of `side_rows` before that of the table
    row_begin: int  # the table's row at which this slice of it begins
    rows: int  # of the slice
    dense_rows: int  # of the table
    share_buckets: int  # 0: an id without a row of its own reads nothing
    table_rows: int
    mixed_seed: int
    mixed_next_seed: int

    @classmethod
    def without_index(cls) -> IndexFacts:
        """The facts of a table whose ids are its rows."""
        return cls(0, -1, 0, 0, 0, 0, 0, 0, 0, 0)

    @classmethod
    def of(cls, view: IndexView, table: int, slots_before: int, slots: int, rows: int) -> IndexFacts:
        """The facts of an index.

        Args:
            view: the index, as eval mode reads it.
            table: its position among the tables.
            slots_before: the slots of the tables before it.
            slots: the slots of its slot table.
            rows: the number of rows that it holds.
        """
        return cls(
            slots_start=2 * slots_before,
            slot_mask=slots - 1,
            side_start=table,
            row_begin=view.row_begin,
            rows=rows,
            dense_rows=view.dense_rows,
            share_buckets=view.share_buckets,
            table_rows=view.table_rows or rows,
            mixed_seed=mix64_integer(view.seed),
            mixed_next_seed=mix64_integer(view.seed + 1),
        )


class ReadIndexes(NamedTuple):
    """The indexes of all tables of a lookup, on one device."""

    slots: Tensor  # int64 [slots of all tables, 2], see slot_table.py
    side_rows: Tensor  # int64 [tables]: the row of id -1; -1 if it has none
    facts: Tensor  # int64 [tables, 10]: one IndexFacts per table
