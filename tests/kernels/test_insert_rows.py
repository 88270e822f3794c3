"""The reference that inserts ids on a device, against the index on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from recfx.kernels.index import device_indexes
from recfx.kernels.index.device_indexes import DeviceIndexes
from recfx.kernels.index.insert_rows_reference import insert_rows_reference
from tests.kernels.indexes import empty
from tests.kernels.inserting import BATCHES, TABLES, assert_copies, decides_as_the_host, of_last_group


@settings(max_examples=150)
@given(TABLES, BATCHES)
def test_decides_as_the_index_on_the_host(tables: list[Any], batches: list[Any]) -> None:
    decides_as_the_host(tables, batches, insert_rows_reference)


def test_ids_that_find_no_slot_up_to_the_last_begin_at_the_first() -> None:
    buffers, policy = empty(30, buckets=1)
    copies = DeviceIndexes.of([(buffers, policy)], "cpu")
    ids = of_last_group(buffers, 9)
    inserted = insert_rows_reference(ids, torch.tensor([9]), copies)
    assert inserted.rows.tolist() == list(range(9))
    assert set(copies.slot_groups[-1, :4].tolist()) < set(ids.tolist())
    assert (copies.slot_groups[:, 0] != -1).nonzero().flatten().tolist() == [0, 1, buffers.slot_groups.shape[0] - 1]
    again = insert_rows_reference(ids, torch.tensor([9]), copies)
    assert again.rows.tolist() == list(range(9))
    assert again.new_rows.numel() == 0


@pytest.mark.parametrize("config", [{"on_full": "evict"}, {"admit_after": 2}])
def test_what_it_does_not_decide_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="evicts, counts candidates, or is a slice"):
        DeviceIndexes.of([empty(4, **config)], "cpu")


def test_slices_and_too_many_buckets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, policy = empty(4, buckets=2)
    with pytest.raises(ValueError, match="is a slice of its table"):
        DeviceIndexes.of([(buffers, policy._replace(row_end=2))], "cpu")
    monkeypatch.setattr(device_indexes, "MOST_BUCKETS", 4)
    with pytest.raises(ValueError, match="4 buckets, of at most 3"):
        DeviceIndexes.of([(buffers, policy)] * 2, "cpu")
    copies = DeviceIndexes.of([None, (buffers, policy)], "cpu")
    assert_copies(copies, [None, (buffers, policy)])
