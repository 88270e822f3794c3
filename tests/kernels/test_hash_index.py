"""The operators on large batches, against a dictionary; tests/hashing/test_index_properties.py has small ones."""

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.index import hash_index
from recfx.kernels.index.buckets import bucket_of
from recfx.kernels.index.index_buffers import EVICTED
from tests.hashing.dictionary import Dictionary
from tests.kernels.chosen_ids import of_one_bucket, of_one_slot
from tests.kernels.indexes import assert_sound, copy_of, empty, insert, insert_in_both

IDS = st.one_of(
    st.integers(-4, 40), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-(2**63), 2**63 - 1, 2**31, -(2**31)])
)


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({"on_full": "error"}, 9000),
        ({"on_full": "error"}, 3500),
        ({"on_full": "share"}, 2500),
        ({"on_full": "evict", "evict": "lru"}, 5800),
        ({"on_full": "evict", "evict": "lfu"}, 5800),
        ({"on_full": "evict", "evict": "lfu"}, 1500),
        ({"on_full": "evict", "admit_after": 2}, 5800),
        ({"on_full": "evict", "evict": "ttl", "ttl_batches": 1}, 5800),
    ],
)
def test_batches_that_are_divided_among_threads(config: dict[str, Any], rows: int) -> None:
    """Batches above ``kIdsWorthParts`` of a table with above ``kBucketsWorthParts`` buckets; some fill a bucket."""
    generator = torch.Generator().manual_seed(rows)
    ours, policy = empty(rows, 40, buckets=50, **config)
    model, full = Dictionary(rows + 40, HashConfig(dense_rows=40, buckets=50, **config)), []
    for step in range(4):
        known = torch.randint(0, 1200 * min(step + 1, 3), (19_000,), generator=generator)
        new = torch.randint(5000 + 700 * step, 6000 + 700 * step, (1000,), generator=generator) * 7919 - 10**7
        ids = torch.cat([known, new, torch.tensor([-1, 2**63 - 1])])[torch.randperm(20_002, generator=generator)]
        torch.set_num_threads((1, 2, 4, 3)[step])
        got = insert_in_both(model, ids, ours, policy)
        assert_sound(ours, policy)
        full.append(int(got.report[0, 1]) >= 0)
    assert any(full) == (rows in (1500, 3500)), full
    assert config["on_full"] != "evict" or rows == 1500 or int(ours.counts[EVICTED]) > 0


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 4096, 4097, 64**3 + 1])
def test_tree_of_free_rows_over_many_levels(rows: int) -> None:
    """Fill up, free a few, fill again: always the lowest."""
    index = empty(rows, buckets=1)
    ids = torch.arange(rows) - 7
    inserted = insert(ids, *index)
    assert torch.equal(inserted.rows, torch.arange(rows))
    assert torch.equal(inserted.new_rows, inserted.rows)
    freed = torch.unique(torch.tensor([0, rows // 2, rows - 1]))
    assert torch.equal(hash_index.erase(ids[freed.flip(0)], *index), freed.flip(0))
    inserted = insert(torch.arange(freed.numel()) + 2**40, *index)
    assert torch.equal(inserted.rows, freed)
    assert inserted.states_before.tolist() == [2] * freed.numel()
    assert inserted.report.tolist() == [[freed.numel(), -1]]
    assert insert(torch.tensor([2**50]), *index).report[0, 1] == 0


def test_sightings_stop_at_the_highest_number() -> None:
    buffers, policy = empty(3, on_full="evict", evict="lfu")
    insert(torch.tensor([5, 6, 7]), buffers, policy)
    most = 2**27 - 1
    buffers.row_scores.copy_(torch.tensor([most - 1, most, 2]) * 2**36 + 1)
    insert(torch.tensor([5, 6, 6, 5, 5, 7]), buffers, policy)
    assert buffers.row_scores.tolist() == [most * 2**36 + 2, most * 2**36 + 2, 3 * 2**36 + 2]
    before = copy_of(buffers)
    assert int(insert(torch.tensor([5, 6, 6, 7, 8, 9]), buffers, policy).report[0, 1]) == 0
    assert torch.equal(buffers.row_scores, before.row_scores)
    assert insert(torch.tensor([8]), buffers, policy).ids_before.tolist() == [7]


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize("rule", [{"evict": "lru"}, {"evict": "lfu"}, {"evict": "ttl", "ttl_batches": 9}])
def test_who_goes_next_in_a_table_of_many_rows(rule: dict[str, Any], buckets: int) -> None:
    """What a scan found lasts for many batches; meanwhile rows are used, erased, protected and free to go again."""
    ours, policy = empty(400, on_full="evict", **rule, buckets=buckets)
    model = Dictionary(400, HashConfig(on_full="evict", **rule, buckets=buckets))
    failed = 0
    for step in range(60):
        count = [30, 60, 5, 90][step % 4]
        # Low ids often, high ones seldom; every now and then everything at once.
        ids = (1200 * torch.rand(count if step % 15 != 14 else 1000) ** 2).long()
        failed += int(insert_in_both(model, ids, ours, policy, step % 7).report[0, 1] >= 0)
        if step % 5 == 0:
            assert hash_index.erase(ids[:7], ours, policy).tolist() == model.erase(ids[:7].tolist())
        assert_sound(ours, policy)
    assert int(ours.counts[3]) > 300
    assert failed > 0


@pytest.mark.parametrize("config", [{}, {"on_full": "evict", "admit_after": 2}])
def test_insert_allocates_nothing_as_large_as_the_table(config: dict[str, Any]) -> None:
    index = empty(1_000_000, **config)
    ids = torch.arange(1000)
    with torch.profiler.profile(profile_memory=True) as profile:
        insert(ids, *index)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert 0 < allocated < 4 * ids.nbytes


@given(
    st.lists(st.tuples(st.lists(IDS, max_size=30), st.lists(IDS, max_size=30), st.integers(0, 5)), max_size=5),
    st.lists(IDS, max_size=5),
)
def test_find_tables_is_find_on_each_stretch(tables: list[tuple[list[int], list[int], int]], others: list[int]) -> None:
    pieces, begins, ends, built, dense = [torch.tensor(others, dtype=torch.int64)], [], [], [], []
    for known, asked, dense_rows in tables:
        buffers, policy = empty(40, dense_rows, on_full="share")
        insert(torch.tensor(known, dtype=torch.int64), buffers, policy)
        begins.append(sum(piece.numel() for piece in pieces))
        pieces.append(torch.tensor(asked, dtype=torch.int64))
        ends.append(begins[-1] + len(asked))
        built.append(buffers)
        dense.append(dense_rows)
    ids, slots, side_rows = torch.cat(pieces), [b.slot_groups for b in built], [b.side_row for b in built]
    arguments = begins, ends, slots, side_rows, [b.lock for b in built], dense
    rows, absent = hash_index.find_tables(ids, *arguments)
    assert rows[: len(others)].tolist() == others
    for begin, end, buffers, dense_rows, count in zip(begins, ends, built, dense, absent.tolist(), strict=True):
        alone = hash_index.find(ids[begin:end], buffers.slot_groups, buffers.side_row, dense_rows)
        assert torch.equal(rows[begin:end], alone)
        assert count == int((alone < 0).sum())


def test_any_nonzero() -> None:
    zero, one, low = torch.tensor([0]), torch.tensor([1]), torch.tensor([-(2**63)])
    assert not hash_index.any_nonzero([zero, zero.clone()])
    assert hash_index.any_nonzero([zero, one])
    assert hash_index.any_nonzero([low])
    with pytest.raises(RuntimeError, match="one number per table"):
        hash_index.any_nonzero([torch.zeros(2, dtype=torch.int64)])


def test_add_counts() -> None:
    counts = [torch.tensor([1, 2, 3]), torch.tensor([2**40, 4]), torch.tensor([5, 6])]
    hash_index.add_counts(counts, [1, 0, 7, -1, -1, 2**33])
    assert [count.tolist() for count in counts] == [[2, 2, 3], [2**40 + 7, 3], [4, 6 + 2**33]]
    for amounts in ([1], list(range(7))):
        with pytest.raises(RuntimeError, match="add_counts"):
            hash_index.add_counts(counts, amounts)
    assert counts[0].tolist() == [2, 2, 3]


CHOSEN = {
    "random": lambda count: torch.randint(-(2**62), 2**62, (count,)),
    "one slot": of_one_slot,
    "one bucket": of_one_bucket,
    "one slot and one bucket": lambda count: (ids := of_one_slot(70 * count))[bucket_of(ids, 64, 0) == 0],
}


@pytest.mark.parametrize(
    "config",
    [
        {"on_full": "error", "rows": 2**20, "buckets": 1},
        {"on_full": "share", "unseen": "share"},
        {"on_full": "evict", "evict": "lru"},
        {"on_full": "evict", "evict": "lfu", "buckets": 1},
        {"on_full": "evict", "admit_after": 2},
    ],
)
def test_no_chosen_batch_takes_much_longer_than_others(config: dict[str, Any]) -> None:
    """Time of this process in training, twice through the same batches, and in finding.

    Where one chain of all ids were searched, it would be hundreds of times as much, for other chosen ids in turn.
    """
    most, batches = 15_000, 4
    took = {}
    for name, choose in CHOSEN.items():
        index = HashIndex(config.get("rows", 2**16), config=HashConfig(**config))
        ids, times = choose(most)[:most].split(-(-most // batches)), []
        for batch in (*ids, *ids):
            begin = time.process_time()
            index.insert(batch)
            times.append(time.process_time() - begin)
        begin = time.process_time()
        for batch in ids:
            index.answer(batch)
        took[name] = sum(times) + time.process_time() - begin
    assert max(took.values()) < 20 * took["random"] + 0.05, took
