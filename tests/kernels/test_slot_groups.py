import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recfx.hashing import HashConfig
from recfx.kernels import free_rows, hash_index, host, slot_groups
from recfx.kernels.hash_index import InFlight
from recfx.kernels.index_buffers import allocate_buffers

INT64 = st.integers(-(2**63), 2**63 - 1)


def empty(groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((groups, 2 * slot_groups.SLOTS), -1), torch.tensor([-1])


@given(st.integers(1, 2**33))
def test_group_count_leaves_room_and_wastes_little(rows: int) -> None:
    slots = slot_groups.SLOTS * slot_groups.group_count(rows)
    assert slots > 2 * rows
    evicting = 16 * slots + (8 + 1 + 8) * rows + 24 * (rows // 16 + 1) + 8 * free_rows.word_count(rows)
    assert evicting <= 64 * rows + 200


@given(st.lists(st.one_of(INT64, st.integers(-2, 12)), unique=True, max_size=16), st.integers(4, 8), st.data())
def test_insert_find_erase(ids: list[int], groups: int, data: st.DataObject) -> None:
    """Up to 16 ids in 17 slots or more: most groups are full."""
    table, side_row = empty(groups + 1)
    rows = dict(zip(ids, range(100, 200), strict=False))
    slot_groups.insert_into_groups(torch.tensor(ids).long(), torch.tensor(list(rows.values())).long(), table, side_row)
    asked = data.draw(st.lists(st.one_of(INT64, st.sampled_from([0, -1, *ids])), max_size=20))
    for id_ in asked:
        assert slot_groups.erase_from_groups(id_, table, side_row) == rows.pop(id_, -1)
        found = slot_groups.find_in_groups(torch.tensor(ids).long(), table, side_row)
        assert found.tolist() == [rows.get(other, -1) for other in ids]
    assert int((table[:, : slot_groups.SLOTS] != -1).sum()) + int(side_row != -1) == len(rows), "tombstones"
    filled = table[:, : slot_groups.SLOTS] != -1
    assert bool((filled[:, :-1] >= filled[:, 1:]).all()), "slots are filled from the first one on"


@pytest.mark.parametrize("groups", [26, 30, 57])
def test_the_operators_with_groups_that_are_nearly_full(groups: int) -> None:
    """With few groups most ids are away from home, and chains of full groups go past the last group."""
    policy = HashConfig(rows=100, buckets=1).resolve(100, False, "table").policy
    buffers = allocate_buffers(policy, "cpu")._replace(slot_groups=torch.empty(groups, 8, dtype=torch.int64))
    buffers.row_ids.fill_(-1)
    for zero in (buffers.row_state, buffers.counts):
        zero.zero_()
    host.index_rebuild().rebuild(buffers, policy)
    generator, held = random.Random(groups), {}
    universe = torch.tensor([*range(-1, 150), 2**63 - 1, -(2**63)])
    probes = 0
    for _ in range(60):
        wanted = [id_ for id_ in generator.sample(universe.tolist(), 40) if id_ not in held][: 100 - len(held)]
        given_out = hash_index.find_or_insert(torch.tensor(wanted).long(), [0], [len(wanted)], [buffers], [policy],
                                              [InFlight.nothing()])  # fmt: skip
        held.update(zip(wanted, given_out.rows.tolist(), strict=True))
        probes = max(probes, slot_groups.longest_probe(buffers.slot_groups))
        for find in (hash_index.find, lambda *given: slot_groups.find_in_groups(*given[:3])):
            found = find(universe, buffers.slot_groups, buffers.side_row, 0)
            assert found.tolist() == [held.get(id_, -1) for id_ in universe.tolist()]
        leaving = generator.sample(sorted(held), generator.randint(0, len(held)))
        erased = hash_index.erase(torch.tensor(leaving).long(), buffers, policy)
        assert erased.tolist() == [held.pop(id_) for id_ in leaving]
        found = hash_index.find(universe, buffers.slot_groups, buffers.side_row, 0)
        assert found.tolist() == [held.get(id_, -1) for id_ in universe.tolist()]
    assert probes >= (4 if groups < 57 else 1)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("dense", [0, 7])
def test_blocks_of_any_length(count: int, dense: int) -> None:
    ids = torch.cat([torch.arange(dense, 400), torch.tensor([-1, 2**62, -(2**63)])])
    table, side_row = empty(110)
    slot_groups.insert_into_groups(ids, torch.arange(ids.numel()) + dense, table, side_row)
    asked = torch.cat([ids, ids + 1000, torch.arange(-20, 30), ids.flip(0)]).repeat(2)[:count]
    found = hash_index.find(asked, table, side_row, dense)
    is_dense = (asked >= 0) & (asked < dense)
    assert torch.equal(found, torch.where(is_dense, asked, slot_groups.find_in_groups(asked, table, side_row)))


def test_find_is_scriptable() -> None:
    table, side_row = empty(2)
    ids = torch.tensor([3, -1, 2**63 - 1])
    slot_groups.insert_into_groups(ids, torch.arange(3), table, side_row)
    namespace = torch.jit.script(slot_groups.find_in_groups)
    assert namespace(torch.tensor([-1, 4, 3]), table, side_row).tolist() == [1, -1, 0]
