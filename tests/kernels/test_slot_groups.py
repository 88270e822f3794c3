import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.index import free_rows, hash_index, index_rebuild, slot_groups
from recfx.kernels.index.hash_index import InFlight
from recfx.kernels.index.index_buffers import allocate_buffers
from tests.kernels.chosen_ids import of_one_slot

INT64 = st.integers(-(2**63), 2**63 - 1)


def empty(groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((groups, 2 * slot_groups.SLOTS), -1), torch.tensor([-1, -(2**63)])


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
        rows_found = slot_groups.find_in_groups(torch.tensor(ids).long(), table, side_row)
        assert rows_found.tolist() == [rows.get(other, -1) for other in ids]
    assert int((table[:, : slot_groups.SLOTS] != -1).sum()) + int(side_row[0] != -1) == len(rows), "tombstones"
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
    index_rebuild.rebuild(buffers, policy)
    generator, row_of = random.Random(groups), {}
    universe = torch.tensor([*range(-1, 150), 2**63 - 1, -(2**63)])
    probes = 0
    for _ in range(60):
        new_ids = [id_ for id_ in generator.sample(universe.tolist(), 40) if id_ not in row_of][: 100 - len(row_of)]
        given_out = hash_index.find_or_insert(torch.tensor(new_ids).long(), [0], [len(new_ids)], [buffers], [policy],
                                              [InFlight.nothing()])  # fmt: skip
        row_of.update(zip(new_ids, given_out.rows.tolist(), strict=True))
        probes = max(probes, slot_groups.longest_probe(buffers.slot_groups, buffers.side_row))
        for find in (hash_index.find, lambda *given: slot_groups.find_in_groups(*given[:3])):
            rows_found = find(universe, buffers.slot_groups, buffers.side_row, 0)
            assert rows_found.tolist() == [row_of.get(id_, -1) for id_ in universe.tolist()]
        leaving = generator.sample(sorted(row_of), generator.randint(0, len(row_of)))
        erased = hash_index.erase(torch.tensor(leaving).long(), buffers, policy)
        assert erased.tolist() == [row_of.pop(id_) for id_ in leaving]
        rows_found = hash_index.find(universe, buffers.slot_groups, buffers.side_row, 0)
        assert rows_found.tolist() == [row_of.get(id_, -1) for id_ in universe.tolist()]
    assert probes >= (4 if groups < 57 else 1)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("dense", [0, 7])
def test_blocks_of_any_length(count: int, dense: int) -> None:
    ids = torch.cat([torch.arange(dense, 400), torch.tensor([-1, 2**62, -(2**63)])])
    table, side_row = empty(110)
    slot_groups.insert_into_groups(ids, torch.arange(ids.numel()) + dense, table, side_row)
    asked = torch.cat([ids, ids + 1000, torch.arange(-20, 30), ids.flip(0)]).repeat(2)[:count]
    rows_found = hash_index.find(asked, table, side_row, dense)
    is_dense = (asked >= 0) & (asked < dense)
    assert torch.equal(rows_found, torch.where(is_dense, asked, slot_groups.find_in_groups(asked, table, side_row)))


def test_find_is_scriptable() -> None:
    table, side_row = empty(2)
    ids = torch.tensor([3, -1, 2**63 - 1])
    slot_groups.insert_into_groups(ids, torch.arange(3), table, side_row)
    namespace = torch.jit.script(slot_groups.find_in_groups)
    assert namespace(torch.tensor([-1, 4, 3]), table, side_row).tolist() == [1, -1, 0]


@pytest.mark.parametrize("seed", [0, 1, -1, -2, 2**63 - 1, -(2**63), 7**22])
def test_operators_and_references_place_ids_alike(seed: int) -> None:
    """Operators of either kind find what the others have inserted, and every id is as near to its home."""
    ids = torch.cat([torch.randint(-(2**63), 2**63 - 1, (500,)), torch.tensor([-1, 0, 1, 2**63 - 1, -(2**63)])])
    policy = HashConfig(buckets=1).resolve(len(ids), False, "table").policy
    buffers = allocate_buffers(policy, "cpu")
    buffers.row_ids.copy_(ids)
    buffers.row_state.fill_(1)
    buffers.counts.zero_()
    buffers.side_row[1] = seed
    index_rebuild.rebuild(buffers, policy)
    assert buffers.side_row.tolist() == [500, seed]
    assert torch.equal(slot_groups.find_in_groups(ids, buffers.slot_groups, buffers.side_row), torch.arange(len(ids)))
    table, side_row = empty(slot_groups.group_count(len(ids)))
    side_row[1] = seed
    slot_groups.insert_into_groups(ids, torch.arange(len(ids)), table, side_row)
    assert torch.equal(hash_index.find(ids, table, side_row, 0), torch.arange(len(ids)))
    filled = [(groups[:, : slot_groups.SLOTS] != -1).sum(1) for groups in (table, buffers.slot_groups)]
    assert torch.equal(*filled)


@pytest.mark.parametrize("begin", [0, 10**6])
def test_chosen_ids_have_homes_like_any_others(begin: int) -> None:
    """Ids that have one home in every slot table, which has no seed."""
    index = HashIndex(40_000, config=HashConfig(buckets=1))
    for ids in of_one_slot(40_000, begin).split(10_000):
        index.insert(ids)
    assert 1 < index.longest_probe() < 60
    loaded = HashIndex(40_000, config=HashConfig(buckets=1))
    loaded.load_state_dict(index.state_dict())
    assert 1 < loaded.longest_probe() < 60


def test_each_index_draws_seeds_of_its_own() -> None:
    """Wherever it is made: an outsider who knows one of them knows nothing about the others."""
    state = torch.random.get_rng_state()
    config = HashConfig(admit_after=2)
    indexes = [HashIndex(8, config=config) for _ in range(3)]
    indexes[1].load_state_dict(indexes[0].state_dict())
    indexes[2].reset()
    indexes.append(HashIndex(8, config=config, device="meta").to_empty(device="cpu"))
    seeds = [
        int(side_row[1]) for index in indexes for side_row in (index.side_row, index.get_buffer("candidate_side_row"))
    ]
    assert len(set(seeds)) == 8
    assert len({seed >> 32 for seed in seeds}) == len({seed & 0xFFFFFFFF for seed in seeds}) == 8
    assert torch.equal(torch.random.get_rng_state(), state)
    assert "side_row" not in indexes[0].state_dict()
