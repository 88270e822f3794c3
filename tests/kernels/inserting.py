"""Batches for several indexes, on the host and on a device, as hypothesis draws them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

from recfx.kernels.index import hash_index
from recfx.kernels.index.device_indexes import DeviceIndexes, next_free_rows
from recfx.kernels.index.index_buffers import IndexBuffers, IndexPolicy
from recfx.kernels.index.insert_rows import InsertedRows
from recfx.kernels.index.slot_groups import SLOTS, home_groups
from tests.kernels.indexes import SEED, empty

IDS = st.one_of(st.integers(-4, 30), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-(2**63), 2**63 - 1, 2**31]))
"""Few of them, so that they repeat; and any."""
CROWD = st.builds(lambda last, stride: [last - i * stride for i in range(25)], st.integers(0, 200), st.integers(0, 9))
LAST_GROUP = st.integers(0, 60)
TABLES = st.lists(
    st.none()
    | st.fixed_dictionaries(
        {
            "index_rows": st.integers(1, 40),
            "dense_rows": st.integers(0, 3),
            "buckets": st.integers(1, 5),
            "on_full": st.sampled_from(["error", "share"]),
            "seed": st.sampled_from([0, 1, -(2**63), 2**63 - 2]),
        }
    ),
    min_size=1, max_size=4,
)  # fmt: skip
BATCHES = st.lists(
    st.tuples(st.lists(st.one_of(st.lists(IDS, max_size=12), CROWD), min_size=4, max_size=4), st.booleans()),
    min_size=1, max_size=4,
)  # fmt: skip
"""Of up to four tables; and whether the first few ids are erased afterwards."""


def of_last_group(buffers: IndexBuffers, count: int) -> torch.Tensor:
    """Ids whose home is the last group."""
    groups = buffers.slot_groups.shape[0]
    ids = torch.arange(2, 2 + 40 * count * groups)
    return ids[home_groups(ids, groups, torch.tensor([-1, SEED])) == groups - 1][:count]


def decides_as_the_host(
    tables: list[dict[str, Any] | None],
    batches: list[tuple[list[list[int]], bool]],
    operator: Callable[[torch.Tensor, torch.Tensor, DeviceIndexes], InsertedRows],
) -> None:
    """Give the batches to indexes on the host and to their copies; rows that are erased in between are free again."""
    on_host = [None if each is None else _empty(**each) for each in tables]
    copies = DeviceIndexes.of(on_host, "cpu")
    for pieces, erases in batches:
        per_table = [
            torch.tensor(ids if each is not None else [abs(id_) % 2**40 for id_ in ids], dtype=torch.int64)
            for ids, each in zip(pieces, on_host, strict=False)
        ]
        ids = torch.cat(per_table)
        ends = torch.tensor(list(accumulate(map(len, per_table))))
        found = operator(ids, ends, copies)
        expected = _on_host(ids, [0, *ends.tolist()], on_host)
        for name, one, other in zip(found._fields, found, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), name
        assert_copies(copies, on_host)
        if erases:
            for index in filter(None, on_host):
                hash_index.erase(ids[:5], *index)
            copies = DeviceIndexes.of(on_host, "cpu")


def _empty(index_rows: int, dense_rows: int, buckets: int, **config: Any) -> tuple[IndexBuffers, IndexPolicy]:
    buffers, policy = empty(index_rows, dense_rows, buckets=min(buckets, index_rows), **config)
    return buffers, policy._replace(mark_new=buckets % 2)


def _on_host(
    ids: torch.Tensor, borders: list[int], indexes: list[tuple[IndexBuffers, IndexPolicy] | None]
) -> InsertedRows:
    present = [(number, *index) for number, index in enumerate(indexes) if index is not None]
    inserted = hash_index.find_or_insert(
        ids,
        [borders[number] for number, *_ in present],
        [borders[number + 1] for number, *_ in present],
        [buffers for _, buffers, _ in present],
        [policy for *_, policy in present],
        [hash_index.InFlight.nothing()] * len(present),
    )
    report = torch.tensor([[0, -1]] * len(indexes))
    for (number, *_), row in zip(present, inserted.report, strict=True):
        report[number] = row
    return InsertedRows(inserted.rows, inserted.new_rows, inserted.states_before, report)


def assert_copies(copies: DeviceIndexes, indexes: list[tuple[IndexBuffers, IndexPolicy] | None]) -> None:
    """The copies hold what the indexes hold, and ids are found in their slots."""
    anew = DeviceIndexes.of(indexes, "cpu")
    for name in ("side_rows", "row_ids", "row_states", "bucket_taken", "counts", "facts"):
        assert torch.equal(getattr(copies, name), getattr(anew, name)), name
    groups = buckets = 0
    for number, index in enumerate(indexes):
        if index is None:
            continue
        buffers, policy = index
        own = copies.slot_groups[groups : groups + buffers.slot_groups.shape[0]]
        groups += buffers.slot_groups.shape[0]
        held = own[:, :SLOTS] != -1
        assert int(held.sum()) == int((buffers.slot_groups[:, :SLOTS] != -1).sum())
        side_row = torch.tensor([int(copies.side_rows[number]), SEED])
        taken = torch.nonzero(buffers.row_state % 2 == 1).squeeze(1)
        found = hash_index.find(buffers.row_ids[taken], own, side_row, policy.own_dense_rows)
        assert torch.equal(found, taken)
        least = copies.next_free[buckets : buckets + policy.buckets]
        buckets += policy.buckets
        assert bool((least <= next_free_rows(buffers.row_state, policy)).all())
