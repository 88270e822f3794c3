import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.index import hash_index, slot_groups
from recfx.kernels.index.hash_index import InFlight
from recfx.kernels.index.index_buffers import allocate_buffers, word_count
from tests.kernels.chosen_ids import of_one_slot


@given(st.integers(1, 2**33))
def test_group_count_leaves_room_and_wastes_little(rows: int) -> None:
    slots = slot_groups.SLOTS * slot_groups.group_count(rows)
    assert slots > 2 * rows
    evicting = 16 * slots + (8 + 1 + 8) * rows + 24 * (rows // 16 + 1) + 8 * word_count(rows)
    assert evicting <= 64 * rows + 200


@pytest.mark.parametrize("groups", [26, 30, 57])
def test_the_operators_with_groups_that_are_nearly_full(groups: int) -> None:
    """With few groups most ids are away from home, and chains of full groups go past the last group."""
    policy = HashConfig(rows=100, buckets=1).resolve(100, False, "table").policy
    buffers = allocate_buffers(policy, "cpu")._replace(slot_groups=torch.empty(groups, 8, dtype=torch.int64))
    buffers.row_ids.fill_(-1)
    for zero in (buffers.row_state, buffers.counts):
        zero.zero_()
    hash_index.rebuild(buffers, policy)
    generator, row_of = random.Random(groups), {}
    universe = torch.tensor([*range(-1, 150), 2**63 - 1, -(2**63)])
    probes = 0
    for _ in range(60):
        new_ids = [id_ for id_ in generator.sample(universe.tolist(), 40) if id_ not in row_of][: 100 - len(row_of)]
        given_out = hash_index.find_or_insert(torch.tensor(new_ids).long(), [0], [len(new_ids)], [buffers], [policy],
                                              [InFlight.nothing()])  # fmt: skip
        row_of.update(zip(new_ids, given_out.rows.tolist(), strict=True))
        probes = max(probes, slot_groups.longest_probe(buffers.slot_groups, buffers.side_row))
        rows_found = hash_index.find(universe, buffers.slot_groups, buffers.side_row, 0)
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
    """Most ids are in their home group, the others right behind it."""
    ids = torch.cat([torch.arange(dense, 400), torch.tensor([-1, 2**62, -(2**63)])])
    index = HashIndex(dense + ids.numel(), config=HashConfig(dense_rows=dense, buckets=1))
    rows = dict(zip(ids.tolist(), index.insert(ids).rows.tolist(), strict=True))
    asked = torch.cat([ids, ids + 1000, torch.arange(-20, 30), ids.flip(0)]).repeat(2)[:count]
    assert index.find(asked).tolist() == [id_ if 0 <= id_ < dense else rows.get(id_, -1) for id_ in asked.tolist()]
    assert 1 <= index.longest_probe() < 10


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
