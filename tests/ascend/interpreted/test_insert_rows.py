"""The operator that inserts ids on a device: its kernels against the reference and the host, and ``opcheck``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from recfx.kernels.index import insert_rows_triton as kernels
from recfx.kernels.index.device_indexes import DeviceIndexes, InsertFacts
from recfx.kernels.index.insert_rows import InsertedRows, insert_rows, insert_rows_
from recfx.kernels.index.insert_rows_reference import insert_rows_reference
from tests.kernels.indexes import empty
from tests.kernels.inserting import BATCHES, TABLES, decides_as_the_host, of_last_group


def _both(ids: torch.Tensor, table_ends: torch.Tensor, indexes: DeviceIndexes) -> InsertedRows:
    """Kernels and reference leave the same, up to the last slot."""
    copies = DeviceIndexes(*(tensor.clone() for tensor in indexes))
    found, wanted = insert_rows(ids, table_ends, indexes), insert_rows_reference(ids, table_ends, copies)
    for name, one, other in zip(found._fields + indexes._fields, (*found, *indexes), (*wanted, *copies), strict=True):
        assert torch.equal(one, other), name
    return found


@settings(max_examples=40)
@given(TABLES, BATCHES)
def test_decides_as_the_index_on_the_host(tables: list[Any], batches: list[Any]) -> None:
    decides_as_the_host(tables, batches, _both)


@pytest.mark.parametrize("count", [1, 4, 5, 9, 30])
def test_ids_that_find_no_slot_up_to_the_last_begin_at_the_first(count: int) -> None:
    """In one table; the other has ids before it."""
    index, other = empty(30, buckets=1), empty(4, buckets=2)
    copies = DeviceIndexes.of([other, index], "cpu")
    ids = of_last_group(index[0], count)
    for shift in range(0, count, 4):
        _both(torch.cat([torch.tensor([-1, 7]), ids.roll(shift)]), torch.tensor([2, 2 + count]), copies)


@pytest.mark.parametrize("count", [0, 1, 40])
def test_opcheck(count: int) -> None:
    indexes = DeviceIndexes.of([empty(20, buckets=2, on_full="share"), empty(20, buckets=2)], "cpu")
    ids = torch.arange(count) % 30 - 1
    torch.library.opcheck(insert_rows_, (ids, torch.tensor([count // 2, count]), *indexes))


def test_the_fields_are_in_the_order_of_the_kernels() -> None:
    positions = {name: getattr(kernels, name.upper()).value for name in InsertFacts._fields}
    assert list(positions.values()) == list(range(len(InsertFacts._fields)))
    assert kernels.FIELDS.value == len(InsertFacts._fields)
