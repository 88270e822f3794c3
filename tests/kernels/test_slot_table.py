"""Tables of slots, their groups, and the tensors of an index."""

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.index import hash_index, slot_groups, slot_table
from recfx.kernels.index.hash_index import InFlight
from recfx.kernels.index.index_buffers import STATE, allocate_buffers, word_count
from tests.kernels.chosen_ids import of_one_slot, slot_hash_inverse
from tests.kernels.indexes import KINDS, assert_same, assert_sound, copy_of, empty, insert, run, tables
from tests.kernels.threads import assert_same_on_any_threads

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


def test_ids_that_come_later_take_the_slots_in_which_they_are_found() -> None:
    """Table by table, some in slots that are taken; id -1 is behind all slots."""
    slot_counts, first, later = [2**7, 2**9], [40, 300], [50, 80]
    slots, taken = torch.full((sum(slot_counts), 2), -1), torch.zeros(sum(slot_counts), dtype=torch.uint8)
    known = [torch.randint(-(2**63), 2**63 - 1, (count + more,)) for count, more in zip(first, later, strict=True)]
    known[1][-1] = -1
    for begin, end in (([0, 0], first), (first, [90, 380])):
        ids = [of_table[one:other] for of_table, one, other in zip(known, begin, end, strict=True)]
        ends = [len(ids[0]), len(ids[0]) + len(ids[1])]
        places = hash_index.take_slots_(taken, slot_counts, torch.cat(ids), ends)
        inside = places < len(slots)
        assert places[~inside].tolist() == [len(slots) + 1] * (end[1] == 380)
        slots[places[inside]] = torch.stack(
            [torch.cat(ids)[inside], torch.cat([torch.arange(*span) for span in zip(begin, end, strict=True)])[inside]],
            1,
        )
    for of_table, own in zip(known, slots.split(slot_counts), strict=True):
        assert slot_table.find_in_slots(of_table, own, torch.tensor([379])).tolist() == list(range(len(of_table)))
    assert torch.equal(taken != 0, slots[:, 0] != -1)
    for wrong in ((taken[1:], slot_counts, ids[0], [50, 50]), (taken, slot_counts, ids[0], [50, 51])):
        with pytest.raises(RuntimeError, match=r"taken must be uint8|the end of each table"):
            hash_index.take_slots_(*wrong)
    with pytest.raises(RuntimeError, match="table 0 has no empty slot"):
        hash_index.take_slots_(taken, slot_counts, torch.arange(2**8), [2**8] * 2)


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


# For each table, how many ids before its own belong to nobody, how many are its own, and what these begin with.
STRETCHES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 70)), min_size=len(KINDS), max_size=len(KINDS)
)


@settings(max_examples=25)
@given(st.lists(STRETCHES, min_size=1, max_size=6))
def test_several_tables_are_each_of_them_alone(batches: list[list[tuple[int, int, int]]]) -> None:
    together, alone = tables(), tables()
    for stretches in batches:
        pieces, begins, ends = [], [], []
        position = 0
        for gap, count, first in stretches:
            pieces.append(torch.full((gap,), -77))
            pieces.append((first + torch.arange(count) * 3) % 40)
            begins.append(position + gap)
            ends.append(position + gap + count)
            position = ends[-1]
        ids = torch.cat([*pieces, torch.tensor([-77])])
        got = run(ids, begins, ends, together)
        trial = [insert(ids[b:e], copy_of(i[0]), i[1]) for b, e, i in zip(begins, ends, alone, strict=True)]
        if any(int(answer.report[0, 1]) >= 0 for answer in trial):
            assert (got.rows == -1).all()
            assert got.new_rows.numel() == got.ids_before.numel() == got.states_before.numel() == 0
            assert got.report[:, 1].tolist() == [int(answer.report[0, 1]) for answer in trial]
        else:
            expected = [insert(ids[b:e], *index) for b, e, index in zip(begins, ends, alone, strict=True)]
            for begin, end, answer in zip(begins, ends, expected, strict=True):
                assert torch.equal(got.rows[begin:end], answer.rows)
            for name in ("new_rows", "states_before", "ids_before", "report"):
                assert torch.equal(getattr(got, name), torch.cat([getattr(answer, name) for answer in expected])), name
            outside = torch.ones_like(ids, dtype=torch.bool)
            for begin, end in zip(begins, ends, strict=True):
                outside[begin:end] = False
            assert (got.rows[outside] == -77).all()
        for (ours, policy), (theirs, _) in zip(together, alone, strict=True):
            assert_same(ours, theirs)
            assert_sound(ours, policy)


def test_ids_of_several_tables_expire_table_by_table() -> None:
    rules: list[dict[str, Any]] = [
        {"evict": "ttl", "ttl_batches": 1},
        {"evict": "lru"},
        {"evict": "ttl", "ttl_batches": 2, "buckets": 3},
    ]
    ours = [empty(30, on_full="evict", **rule) for rule in rules]
    expired = []
    for step in range(6):
        ids = torch.cat([torch.arange(8) + 3 * step + 100 * table for table in range(3)])
        left = run(ids, [0, 8, 16], [8, 16, 24], ours)
        for buffers, policy in ours:
            assert_sound(buffers, policy)
        expired.append(sorted(left.expired_ids.tolist()))
    assert expired == [
        [], [], [0, 1, 2], [3, 4, 5, 200, 201, 202], [6, 7, 8, 203, 204, 205], [9, 10, 11, 206, 207, 208]
    ]  # fmt: skip


@pytest.mark.parametrize("full", [False, True])
def test_several_tables_do_not_depend_on_threads(full: bool) -> None:
    def train() -> list[torch.Tensor]:
        indexes = tables(3000)[:5]
        for step in range(5):
            ids = 500 * step + torch.randint(0, 2500, (40_000,), generator=torch.Generator().manual_seed(step))
            got = run(ids, [0, 9000, 9000, 15_000, 30_000], [8000, 9000, 15_000, 30_000, 40_000], indexes)
            assert (got.report[:, 1] == -1).all()
        if full:
            got = run(torch.arange(40_000), [0] * 5, [0, 0, 0, 0, 20_000], indexes)
            assert got.report[:, 1].max() >= 0
        return [*got, *(getattr(buffers, name) for buffers, _ in indexes for name in STATE)]

    assert_same_on_any_threads(train)


def test_no_tables_and_no_ids() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert [tensor.numel() for tensor in run(nothing, [], [], [])] == [0] * 6
    assert run(torch.tensor([5]), [], [], []).rows.tolist() == [5]
    indexes = tables()
    got = run(nothing, [0] * len(indexes), [0] * len(indexes), indexes)
    assert got.report.tolist() == [[0, -1]] * len(indexes)
    assert [int(buffers.counts[0]) for buffers, _ in indexes] == [1] * len(indexes), "an empty batch is a batch"
