"""``HashIndex`` against a dictionary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.errors import TableFullError
from recfx.hashing import HashConfig, HashIndex
from tests.hashing.dictionary import Dictionary
from tests.hashing.strategies import CROWD, IDS, configurations, state_of
from tests.kernels.indexes import assert_sound, insert_in_both

ACTIONS = st.sampled_from(["insert", "insert", "insert", "in flight", "find", "answer", "erase", "save and load"])
STEPS = st.lists(st.tuples(ACTIONS, st.one_of(st.lists(IDS, max_size=30), CROWD, CROWD)), min_size=8, max_size=20)


def assert_is(index: HashIndex, model: Dictionary) -> None:
    """The index holds what the dictionary holds, and all that is derived from it fits."""
    ids, rows = index.items()
    assert dict(zip(rows.tolist(), ids.tolist(), strict=True)) == model.owners()
    assert rows.tolist() == sorted(rows.tolist())
    assert len(index) == len(model.entries)
    assert torch.equal(index.find(ids), rows)
    states = [1 if row in model.owners() else 2 if row in model.used else 0 for row in range(model.rows)]
    assert index.row_state.tolist() == states
    config = model.config
    candidates, sightings = index.candidates()
    # Whoever is admitted to a full bucket and shares is not counted on.
    expected = {id_: min(count, config.admit_after) for id_, count in model.candidates.items()}
    assert dict(zip(candidates.tolist(), sightings.tolist(), strict=True)) == expected
    for bucket in {model.bucket(id_) for id_ in expected}:  # oldest first; of different buckets there is no order
        assert [i for i in candidates.tolist() if model.bucket(i) == bucket] == [
            i for i in expected if model.bucket(i) == bucket
        ]
    if config.on_full == "evict":
        for id_, row in zip(ids.tolist(), rows.tolist(), strict=True):
            entry = model.entries[id_]
            score = entry.last_batch + (entry.sightings << 36 if config.evict == "lfu" else 0)
            assert int(index.row_scores[row]) == score
    assert dict(zip(model.counters, index.counts.tolist(), strict=True)) == model.counters
    assert_sound(index.index_buffers(), index.policy)


def insert(index: HashIndex, model: Dictionary, ids: torch.Tensor, batches_in_flight: int) -> None:
    before = state_of(index)
    if batches_in_flight:
        insert_in_both(model, ids.long(), index.index_buffers(), index.policy, batches_in_flight)
        index.written()
        return
    expected = model.insert(ids.tolist())
    if expected is None:
        with pytest.raises(TableFullError):
            index.insert(ids)
        if model.config.ttl_batches is None:
            torch.testing.assert_close(state_of(index), before, rtol=0, atol=0)
    else:
        inserted = index.insert(ids)
        assert inserted.rows.tolist() == expected.rows
        assert inserted.new_rows.tolist() == expected.new_rows
        assert inserted.evicted_ids.tolist() == expected.expired_ids + expected.evicted_ids


@settings(max_examples=300)
@given(configurations(), st.sampled_from([torch.int64, torch.int64, torch.int32]), STEPS)
def test_index_is_a_dictionary(
    rows_and_config: tuple[int, HashConfig], dtype: torch.dtype, steps: list[tuple[str, list[int]]]
) -> None:
    rows, config = rows_and_config
    index, model = HashIndex(rows, config=config), Dictionary(rows, config)
    for action, id_list in steps:
        if dtype == torch.int32:
            id_list = [id_ for id_ in id_list if -(2**31) <= id_ < 2**31]
        ids = torch.tensor(id_list, dtype=dtype)
        if action == "insert":
            insert(index, model, ids, 0)
        elif action == "in flight":
            insert(index, model, ids, 1 + len(id_list) % 3)
        elif action == "find":
            assert index.find(ids).tolist() == [model.find(id_) for id_ in id_list]
        elif action == "answer":
            assert index.answer(ids).tolist() == [model.answer(id_) for id_ in id_list]
        elif action == "erase":
            assert index.erase(ids).tolist() == model.erase(id_list)
        else:
            loaded = HashIndex(rows, config=config)
            loaded.load_state_dict(state_of(index))
            index = loaded
        assert_is(index, model)


def test_long_life_does_not_wear_out_the_index() -> None:
    """A thousand generations of fill and erase: the slots are as empty after it as in the beginning."""
    index = HashIndex(300, config=HashConfig(buckets=1))
    for generation in range(1000):
        ids = torch.arange(300) * 977 + generation * 1_000_003
        assert torch.equal(index.insert(ids)[1], torch.arange(300))
        assert (index.erase(ids[torch.randperm(300)]) >= 0).all()
    assert (index.slot_groups == -1).all()
    assert index.occupancy().taken == 0
    assert index.find(torch.arange(-2, 1000)).unique().tolist() == [-1]


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_long_life_of_an_index_that_evicts(evict: str) -> None:
    """A thousand generations: the slots hold just the rows' ids, as densely as a new index's do."""
    config = HashConfig(buckets=2, on_full="evict", evict=evict)  # type: ignore[arg-type]
    index, model = HashIndex(40, config=config), Dictionary(40, config)
    for generation in range(1000):
        # Two ids of the last generation come back, so that the two rules differ.
        ids = [generation * 1_000_003 - 977 * k for k in range(1, 10)] + [(generation - 1) * 1_000_003 - 977] * 2
        expected = model.insert(ids)
        assert expected is not None
        assert index.insert(torch.tensor(ids))[0].tolist() == expected.rows
    assert_is(index, model)
    assert index.counters["evicted"] > 7000
    assert int((index.slot_groups[:, :4] != -1).sum()) == 40
    new = HashIndex(40, config=config)
    new.load_state_dict(index.state_dict())
    assert index.longest_probe() <= new.longest_probe() + 4
    assert index.longest_probe() < 20
