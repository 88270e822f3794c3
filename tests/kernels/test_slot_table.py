import fbgemm_gpu  # noqa: F401  (loads torch.ops.fbgemm)
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recfx.kernels import slot_table

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
