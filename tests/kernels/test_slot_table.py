import time

import fbgemm_gpu  # noqa: F401  (loads torch.ops.fbgemm)
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recfx.kernels.index import hash_index, slot_table
from tests.kernels.chosen_ids import of_one_slot, slot_hash_inverse

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.integers(1, 2**33))
def test_slot_count_leaves_room_and_wastes_little(rows: int) -> None:
    slots = slot_table.slot_count(rows)
    assert slots & (slots - 1) == 0
    assert slots > rows, "probing for an absent id would not end"
    assert rows <= 0.75 * slots or rows < 3
    assert slots < 2.7 * rows + 2


@pytest.mark.parametrize("slots", [2**4, 2**10])
def test_fbgemm_reads_our_slots(slots: int) -> None:
    """Same hash, same probing, same layout: 3/4 full, so that ids do probe."""
    ids = torch.randint(-(2**63), 2**63 - 1, (3 * slots // 4,))
    rows = torch.randperm(ids.numel())
    table, side_row = torch.full((slots, 2), -1), torch.tensor([-1])
    slot_table.insert_into_slots(ids, rows, table, side_row)
    away_from_home = table[slot_table.home_slots(ids, slots), 0] != ids
    assert away_from_home.any()

    absent = torch.randint(-(2**63), 2**63 - 1, (1000,))
    asked = torch.cat([ids, absent])
    got = torch.ops.fbgemm.pruned_hashmap_lookup(
        asked, torch.tensor([0, asked.numel()]), table, torch.tensor([0, slots])
    )
    assert torch.equal(got, torch.cat([rows, torch.full_like(absent, -1)]))


@given(st.lists(st.one_of(INT64, st.integers(-2, 12)), unique=True, max_size=15))
def test_insert_and_find(ids: list[int]) -> None:
    slots, side_row = torch.full((32, 2), -1), torch.tensor([-1])
    rows = torch.arange(100, 100 + len(ids))
    slot_table.insert_into_slots(torch.tensor(ids).long(), rows, slots, side_row)
    asked = torch.tensor([*ids, *(id_ ^ 1 for id_ in ids if id_ ^ 1 not in ids)]).long()
    assert slot_table.find_in_slots(asked, slots, side_row).tolist() == rows.tolist() + [-1] * (len(asked) - len(ids))


def test_find_is_scriptable() -> None:
    slots, side_row = torch.full((8, 2), -1), torch.tensor([-1])
    ids = torch.tensor([3, -1, 2**63 - 1])
    slot_table.insert_into_slots(ids, torch.arange(3), slots, side_row)
    namespace = torch.jit.script(slot_table.find_in_slots)
    assert namespace(torch.tensor([-1, 4, 3]), slots, side_row).tolist() == [1, -1, 0]


@pytest.mark.parametrize("slots", [2**17, 2**18])
def test_chosen_ids_are_written_in_little_time(slots: int) -> None:
    """All of them have the last slot but a few as their home. One by one, they would take four billion steps."""
    ids = slot_hash_inverse((torch.arange(1, 90_001) << 20) + (1 << 20) - 9)
    ids[::1000] = torch.arange(90)
    assert set(slot_table.home_slots(ids[1:1000], slots).tolist()) == {slots - 9}
    table, side_row = torch.empty(slots, 2, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    states, lock = torch.ones(ids.numel(), dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    begin = time.process_time()
    hash_index.slot_tables_(table, side_row, [slots], [ids], [states], [lock])
    assert time.process_time() - begin < 0.5
    place = torch.nonzero(table[:, 0] != -1).squeeze(1)
    assert torch.equal(table[place, 0].sort().values, ids.sort().values)
    assert torch.equal(ids[table[place, 1]], table[place, 0])
    # Every id is found: from its home to its place, no slot is empty.
    filled = torch.cat([torch.zeros(1).long(), (table[:, 0] != -1).repeat(2).long().cumsum(0)])
    home = slot_table.home_slots(table[place, 0], slots)
    end = torch.where(place < home, place + slots, place)
    assert torch.equal(filled[end] - filled[home], end - home)


@pytest.mark.parametrize("count", [0, 1, 100, 6_000, 8_000])
def test_the_operator_puts_ids_where_one_by_one_they_would_go(count: int) -> None:
    slots, some = 2**13, torch.randint(-(2**63), 2**63 - 1, (8_000,))
    ids = torch.cat([of_one_slot(4_000), some])[torch.randperm(12_000)][:count]
    expected, home = [-1] * slots, slot_table.home_slots(ids, slots).tolist()
    for id_, slot in zip(ids.tolist(), home, strict=True):
        place = slot
        while expected[place] != -1:
            place = (place + 1) % slots
        expected[place] = id_
    table, side_row = torch.empty(slots, 2, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    states, lock = torch.ones(count, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    hash_index.slot_tables_(table, side_row, [slots], [ids], [states], [lock])
    assert table[:, 0].tolist() == expected
