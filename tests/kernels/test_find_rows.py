"""Finding rows of ids: hashes, different ids, lookups of files."""

import time
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.index import hash_index
from recfx.kernels.index.find_rows import find_rows_reference
from recfx.kernels.index.mix64 import mix64, mix64_integer, mixed_modulo, shifted_by_floats, shifted_right, to_int64
from recfx.kernels.route.different_ids import different_ids, different_ids_reference, sum_rows, sum_rows_reference
from tests.kernels.chosen_ids import mix64_inverse
from tests.kernels.finding import EXTREMES, TABLES, copies_of, filled
from tests.kernels.served import Case, ServedTable, cases, served_lookup, served_lookup_reference, stored_rows
from tests.kernels.threads import assert_same_on_any_threads


@pytest.mark.parametrize("number", range(len(TABLES)))
def test_rows_are_those_of_the_index(number: int) -> None:
    index = filled(number)
    ids = torch.cat(
        [index.items()[0], torch.tensor(EXTREMES), torch.arange(-50, 50), torch.arange(10**15, 10**15 + 99)]
    )
    own, answered = index.find(ids), index.answer(ids)
    rows, absent = find_rows_reference(ids, torch.tensor([ids.numel()]), copies_of([index]))
    assert torch.equal(rows, answered)
    assert absent.tolist() == [int((own < 0).sum())]


def test_tables_one_after_the_other() -> None:
    """One of them without an index, one without ids in the batch."""
    indexes = [filled(0), None, filled(1), filled(2)]
    asked = [torch.tensor([70, -1, 3]), torch.tensor([5, 9]), torch.tensor([], dtype=torch.int64), torch.tensor([-1])]
    ends = torch.tensor(list(accumulate(map(len, asked))))
    rows, absent = find_rows_reference(torch.cat(asked), ends, copies_of(indexes))
    expected = [ids if index is None else index.answer(ids) for index, ids in zip(indexes, asked, strict=True)]
    assert torch.equal(rows, torch.cat(expected))
    assert absent.tolist() == [
        0 if index is None else int((index.find(ids) < 0).sum()) for index, ids in zip(indexes, asked, strict=True)
    ]


def test_copies_are_the_slots() -> None:
    indexes = [filled(0), filled(1)]
    copies = copies_of(indexes)
    slots, side_rows = torch.empty_like(copies.slots[: -len(indexes)]), torch.empty(len(indexes), dtype=torch.int64)
    counts, states = [index.slot_count for index in indexes], [index.row_state for index in indexes]
    arguments = counts, [index.row_ids for index in indexes], states, [index.lock for index in indexes]
    hash_index.slot_tables_(slots, side_rows, *arguments)
    assert torch.equal(slots, torch.cat([index.slot_table()[0] for index in indexes]))
    assert torch.equal(side_rows, torch.cat([index.side_row[:1] for index in indexes]))
    for wrong in (slots[:-1], slots.int()):
        with pytest.raises(RuntimeError, match=r"do not fit into|must be int64"):
            hash_index.slot_tables_(wrong, side_rows, *arguments)
    with pytest.raises(RuntimeError, match="one entry per table"):
        hash_index.slot_tables_(slots, side_rows, counts, arguments[1][:1], *arguments[2:])
    with pytest.raises(RuntimeError, match=r"\d+ ids of table 0 do not fit into 1 slots"):
        hash_index.slot_tables_(slots[:2], side_rows, [1, 1], *arguments[1:])
    full = HashIndex(2, config=HashConfig(dense_rows=0, buckets=1))
    full.find_or_insert(torch.tensor([5, 6]))
    own = [full.row_ids], [full.row_state], [full.lock]
    with pytest.raises(RuntimeError, match="2 ids of table 0 do not fit into 2 slots"):
        hash_index.slot_tables_(slots[:2], side_rows[:1], [2], *own)  # a search for another id would never end


@pytest.mark.parametrize("unseen", ["share", "row"])
def test_slices_answer_for_their_own_ids(unseen: Any) -> None:
    config = HashConfig(dense_rows=10, buckets=4, unseen=unseen)
    ids = torch.cat([torch.arange(20), torch.tensor(EXTREMES)])
    for begin, end in ((0, 5), (5, 10), (10, 30), (30, 50)):
        index = HashIndex(50, config=config, row_begin=begin, row_end=end)
        index.insert(ids[index.holds(ids)])
        rows, _ = find_rows_reference(ids, torch.tensor([ids.numel()]), copies_of([index]))
        assert torch.equal(rows, index.answer(ids))


INT64 = st.integers(-(2**63), 2**63 - 1)


def plain_splitmix(value: int) -> int:
    z = value % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_published_vectors() -> None:
    # The first outputs of splitmix64 seeded with 1234567 (the state advances by the golden ratio before each).
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [1234567 + k * 0x9E3779B97F4A7C15 for k in (1, 2, 3)]
    got = mix64(torch.tensor([to_int64(state) for state in states]))
    assert [value % 2**64 for value in got.tolist()] == expected


@given(st.lists(INT64, min_size=1, max_size=20), INT64)
def test_tensors_equal_unsigned_integers(ids: list[int], seed: int) -> None:
    tensor = torch.tensor(ids)
    assert [value % 2**64 for value in mix64(tensor).tolist()] == [plain_splitmix(id_) for id_ in ids]
    seeded = [plain_splitmix(id_ % 2**64 ^ plain_splitmix(seed)) for id_ in ids]
    assert [value % 2**64 for value in mix64(tensor, seed).tolist()] == seeded
    assert mix64_integer(seed) % 2**64 == plain_splitmix(seed)


@given(st.lists(INT64, min_size=1, max_size=20), st.integers(1, 2**40), INT64)
def test_modulo_clears_the_sign_first(ids: list[int], pieces: int, seed: int) -> None:
    expected = [plain_splitmix(id_ % 2**64 ^ plain_splitmix(seed)) % 2**63 % pieces for id_ in ids]
    assert mixed_modulo(torch.tensor(ids), pieces, seed).tolist() == expected


@given(st.lists(INT64, min_size=1, max_size=20), st.integers(16, 62))
def test_shifts_with_and_without_floats(numbers: list[int], bits: int) -> None:
    expected = [number % 2**64 >> bits for number in [*numbers, -1, -(2**63), 2**63 - 1]]
    tensor = torch.tensor([*numbers, -1, -(2**63), 2**63 - 1])
    for shifted in (shifted_right, shifted_by_floats):
        assert shifted(tensor, bits).tolist() == expected


def test_scriptable() -> None:
    ids = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    for seed in (0, -7):
        assert torch.equal(torch.jit.script(mix64)(ids, seed), mix64(ids, seed))
        assert torch.equal(torch.jit.script(mixed_modulo)(ids, 64, seed), mixed_modulo(ids, 64, seed))
    assert torch.equal(torch.jit.script(shifted_by_floats)(ids, 33), shifted_right(ids, 33))


KEYS = st.lists(
    st.tuples(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 3), max_size=40), st.booleans()), max_size=4
)


@settings(max_examples=150)
@given(KEYS)
def test_each_id_is_found_at_its_first_place(keys: list[tuple[list[int], bool]]) -> None:
    ids = torch.tensor([id_ for of_key, _ in keys for id_ in of_key], dtype=torch.int64)
    counts, chosen = [len(of_key) for of_key, _ in keys], [is_chosen for _, is_chosen in keys]
    is_first, numbers, different = different_ids(ids, counts, chosen)
    for ours, theirs in zip((is_first, numbers), different_ids_reference(ids, counts, chosen), strict=False):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert different == different_ids_reference(ids, counts, chosen)[2].tolist()
    expected: list[int] = []
    for (of_key, is_chosen), count in zip(keys, different, strict=True):
        known: dict[int, int] = {}
        for place, id_ in enumerate(of_key):
            expected.append(known.setdefault(id_ if is_chosen else place, len(known)))
        assert count == len(known)
    assert numbers.tolist() == expected


def test_chosen_ids_are_found_in_little_time() -> None:
    """One slot after the other, they would take two billion steps."""
    ids = mix64_inverse(torch.arange(60_000) << 20)
    begin = time.process_time()
    assert different_ids(ids.repeat(2), [120_000], [True])[2] == [60_000]
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_sums_have_the_bits_of_adding_row_by_row(dim: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    rows, places = torch.randn(9000, dim, generator=generator), torch.randint(0, 5000, (9000,), generator=generator)
    torch.set_num_threads(threads)
    summed = sum_rows(rows, places, 5000)
    expected = torch.zeros(5000, dim)
    for row, place in zip(rows, places.tolist(), strict=True):
        expected[place] += row
    assert torch.equal(summed, expected)
    assert torch.equal(sum_rows_reference(rows, places, 5000), expected)
    assert sum_rows(rows[:0], places[:0], 0).shape == (0, dim)


@pytest.mark.parametrize("operator", [different_ids, different_ids_reference])
@pytest.mark.parametrize(("counts", "chosen"), [([2], [True]), ([4, -1], [True, True]), ([3], []), ([9], [True])])
def test_keys_that_do_not_fit_the_ids_are_refused(operator: Any, counts: list[int], chosen: list[bool]) -> None:
    with pytest.raises(RuntimeError, match="different_ids"):
        operator(torch.tensor([5, 6, 5]), counts, chosen)


@pytest.mark.parametrize("operator", [sum_rows, sum_rows_reference])
@pytest.mark.parametrize("places", [[0, 2], [-1, 0], [0]])
def test_places_that_are_none_are_refused(operator: Any, places: list[int]) -> None:
    with pytest.raises(RuntimeError, match="sum_rows"):
        operator(torch.ones(2, 3), torch.tensor(places), 2)


@settings(max_examples=120, deadline=None)
@given(cases())
def test_agrees_with_its_reference(case: Case) -> None:
    pooled = served_lookup(*case.arguments())  # type: ignore[arg-type]
    expected = served_lookup_reference(*case.arguments())  # type: ignore[arg-type]
    torch.testing.assert_close(
        pooled, expected, rtol=1e-5, atol=1e-3
    )  # sums of up to 200 numbers of up to 15, in another order


@settings(max_examples=15, deadline=None)
@given(cases(times=100))
def test_threads_do_not_matter(case: Case) -> None:
    assert_same_on_any_threads(lambda: [served_lookup(*case.arguments())])  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 3]), st.sampled_from([1, 2, 3, 8, 17, 64, 100, 260]), st.booleans(), st.integers(0, 1000))
def test_a_bag_of_one_id_is_the_sum_of_its_row(row_format: int, columns: int, is_weighted: bool, seed: int) -> None:
    """Bit for bit: a second id, which has no row, adds nothing."""
    generator = torch.Generator().manual_seed(seed)
    columns += columns % 2 if row_format == 3 else 0
    rows = stored_rows(torch.randn(8, columns, generator=generator), row_format).reshape(-1)
    index = HashIndex(8, config=HashConfig(dense_rows=0))
    known = torch.arange(100, 108)
    index.find_or_insert(known)
    tables = [ServedTable(8, columns, row_format, index.slot_count)]
    slots, scale = index.slot_table()[0], torch.randn(8, generator=generator)

    def pooled(ids: torch.Tensor, length: int, scale: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(0, ids.numel() + 1, length)
        return served_lookup(ids, offsets, rows, tables, [0], slots, False, scale if is_weighted else None)

    both = torch.stack([known, torch.full((8,), 77777)], dim=1).view(-1)
    assert torch.equal(pooled(known, 1, scale), pooled(both, 2, scale.repeat_interleave(2)))
    assert not pooled(both[1::2], 1, scale).any()


def test_opcheck() -> None:
    rows = stored_rows(torch.randn(10, 6), 2).reshape(-1)
    empty = torch.empty(0, 2, dtype=torch.int64)
    arguments = ([10], [6], [2], [0], empty, [0], [-1], [0], [0], [0], False, None)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    for unpooled in (False, True):
        torch.library.opcheck(torch.ops.recfx.served_lookup, (ids, offsets, rows, *arguments, unpooled))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([10])}, "id_out_of_range"),
        ({"ids": torch.tensor([-1])}, "id_out_of_range"),
        ({"ids": torch.tensor([1], dtype=torch.int32)}, "int64"),
        ({"offsets": torch.tensor([0, 2])}, "ascend within"),
        ({"rows": torch.zeros(99, dtype=torch.uint8)}, "bytes"),
        ({"tables": [ServedTable(10, 6, 4)]}, "is not one"),
        ({"tables": [ServedTable(10, 6, 2, slots=4)]}, "too few slots"),
        ({"table_of_feature": [1]}, "no table"),
        ({"per_sample_weights": torch.zeros(2)}, "per_sample_weights"),
        (
            {"tables": [ServedTable(10, 6, 2, slots=4)], "slots": torch.tensor([[1, 10]] * 4)},
            "id_out_of_range",
        ),  # a slot that names a row beyond the table
        ({"offsets": torch.tensor([0, 0]), "unpooled": True}, "must all be in a bag"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "ids": torch.tensor([1]),
        "offsets": torch.tensor([0, 1]),
        "rows": torch.zeros(100, dtype=torch.uint8),
        "tables": [ServedTable(10, 6, 2)],
        "table_of_feature": [0],
        "slots": torch.empty(0, 2, dtype=torch.int64),
    }
    with pytest.raises((RuntimeError, IndexError), match=message):
        served_lookup(**(arguments | change))  # type: ignore[arg-type]
