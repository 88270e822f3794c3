"""The C++ operators against the ATen references. What both must do is in tests/hashing/test_index_properties.py."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.hashing import HashConfig
from recfx.hashing.state import allocate
from recfx.kernels import hash_index, library
from recfx.kernels.hash_index import IndexBuffers

IDS = st.one_of(
    st.integers(-4, 40),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([-(2**63), 2**63 - 1, 2**31, -(2**31)]),
)
BATCHES = st.lists(st.tuples(st.sampled_from(["insert", "share", "erase", "find"]), st.lists(IDS, max_size=40)))


def empty(rows: int, dense_rows: int = 0, buckets: int | None = None, seed: int = 0) -> IndexBuffers:
    assert library.load(), library.why_not()
    buffers = allocate(HashConfig(dense_rows=dense_rows, buckets=buckets, seed=seed).resolve(rows, False), "cpu")
    buffers.row_ids.fill_(-1)
    buffers.row_state.zero_()
    hash_index.rebuild(buffers, dense_rows, seed)
    return buffers


def copy_of(buffers: IndexBuffers) -> IndexBuffers:
    return IndexBuffers(*(tensor.clone() for tensor in buffers))


def assert_same_index(left: IndexBuffers, right: IndexBuffers, dense_rows: int, seed: int) -> None:
    """Everything equal, bit for bit; of the slots what can be found in them, their order is nobody's business."""
    for name in ("side_row", "row_ids", "row_state", "free_rows", "bucket_taken"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    ids = left.row_ids[left.row_state == 1]
    for buffers in (left, right):
        found = hash_index.find_reference(ids, buffers.slots, buffers.side_row, 0)
        assert torch.equal(left.row_ids[found], ids)
        used = int((buffers.slots[:, 0] != -1).sum()) + int(buffers.side_row >= 0)
        assert used == ids.numel()
        rebuilt = copy_of(buffers)
        assert hash_index.rebuild(rebuilt, dense_rows, seed).tolist() == [hash_index.NO_PROBLEM, -1]
        assert torch.equal(rebuilt.free_rows, buffers.free_rows)
        assert torch.equal(rebuilt.bucket_taken, buffers.bucket_taken)


@settings(max_examples=150)
@given(st.integers(1, 200), st.integers(0, 5), st.integers(1, 5), st.sampled_from([0, 1, -(2**63)]), BATCHES)
def test_operators_equal_references(
    index_rows: int, dense_rows: int, buckets: int, seed: int, batches: list[tuple[str, list[int]]]
) -> None:
    buckets = min(buckets, index_rows)
    ours = empty(index_rows + dense_rows, dense_rows, buckets, seed)
    theirs = copy_of(ours)
    for kind, id_list in batches:
        ids = torch.tensor(id_list, dtype=torch.int64)
        if kind == "erase":
            got: tuple[torch.Tensor, ...] = (hash_index.erase(ids, ours, dense_rows, seed),)
            expected: tuple[torch.Tensor, ...] = (hash_index.erase_reference(ids, theirs, dense_rows, seed),)
        elif kind == "find":
            got = (hash_index.find(ids, ours.slots, ours.side_row, dense_rows),)
            expected = (hash_index.find_reference(ids, theirs.slots, theirs.side_row, dense_rows),)
        else:
            share = kind == "share"
            got = hash_index.find_or_insert(ids, ours, dense_rows, seed, share)
            expected = hash_index.find_or_insert_reference(ids, theirs, dense_rows, seed, share)
        for left, right in zip(got, expected, strict=True):
            assert left.dtype == right.dtype == torch.int64
            assert torch.equal(left, right)
    assert_same_index(ours, theirs, dense_rows, seed)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 4096, 4097, 64**3 + 1])
def test_tree_of_free_rows_over_many_levels(rows: int) -> None:
    """Fill up, free a few, fill again: always the lowest."""
    buffers = empty(rows, buckets=1)
    ids = torch.arange(rows) - 7
    answer, new_rows, status = hash_index.find_or_insert(ids, buffers, 0, 0, False)
    assert torch.equal(answer, torch.arange(rows))
    assert torch.equal(new_rows, answer)
    freed = torch.unique(torch.tensor([0, rows // 2, rows - 1]))
    assert torch.equal(hash_index.erase(ids[freed.flip(0)], buffers, 0, 0), freed.flip(0))
    answer, _, status = hash_index.find_or_insert(torch.arange(freed.numel()) + 2**40, buffers, 0, 0, False)
    assert torch.equal(answer, freed)
    assert status.tolist() == [-1, 0]
    assert hash_index.find_or_insert(torch.tensor([2**50]), buffers, 0, 0, False)[2].tolist() == [0, 0]


def test_full_leaves_every_byte_as_it_was() -> None:
    buffers = empty(64, dense_rows=4, buckets=2)
    hash_index.find_or_insert(torch.arange(100, 120), buffers, 4, 0, False)
    before = copy_of(buffers)
    answer, new_rows, status = hash_index.find_or_insert(torch.arange(90, 400), buffers, 4, 0, False)
    assert int(status[0]) in (0, 1)
    assert new_rows.numel() == 0
    assert (answer == -1).all()
    for name in IndexBuffers._fields:
        assert torch.equal(getattr(buffers, name), getattr(before, name)), name


def swap(row_ids: torch.Tensor, one: int, other: int) -> None:
    row_ids[[one, other]] = row_ids[[other, one]]


PROBLEMS: list[tuple[str, Callable[[IndexBuffers], object], int, int]] = [
    ("state", lambda b: b.row_state[9:10].fill_(3), hash_index.UNKNOWN_STATE, 9),
    ("dense row", lambda b: b.row_state[2:3].fill_(1), hash_index.DENSE_ROW, 2),
    ("dense id", lambda b: b.row_ids[5:6].fill_(3), hash_index.DENSE_ID, 5),
    ("bucket", lambda b: swap(b.row_ids, 5, 34), hash_index.WRONG_BUCKET, 5),
    ("duplicate", lambda b: b.row_ids[8:9].copy_(b.row_ids[6:7]), hash_index.DUPLICATE_ID, 8),
]


@pytest.mark.parametrize(("damage", "problem", "row"), [p[1:] for p in PROBLEMS], ids=[p[0] for p in PROBLEMS])
@pytest.mark.parametrize("reference", [False, True])
def test_rebuild_names_the_lowest_bad_row(
    damage: Callable[[IndexBuffers], object], problem: int, row: int, reference: bool
) -> None:
    buffers = empty(64, dense_rows=4, buckets=2)
    hash_index.find_or_insert(torch.arange(100, 130), buffers, 4, 0, False)
    damage(buffers)
    rebuild = hash_index.rebuild_reference if reference else hash_index.rebuild
    assert rebuild(buffers, 4, 0).tolist() == [problem, row]


def test_results_do_not_depend_on_threads() -> None:
    ids = torch.randint(-(2**62), 2**62, (100_000,)) // 2**45  # about 2**18 different ones
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            buffers = empty(70_000)
            answers = hash_index.find_or_insert(ids, buffers, 0, 0, True)
            found = hash_index.find(ids, buffers.slots, buffers.side_row, 0)
            results.append((*answers, found, *buffers))
    finally:
        torch.set_num_threads(threads)
    assert int(results[0][2][1]) > 0, "nothing was shared: the case is too easy"
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            assert torch.equal(left, right)


def test_insert_allocates_nothing_as_large_as_the_table() -> None:
    buffers = empty(1_000_000)
    ids = torch.arange(1000)
    with torch.profiler.profile(profile_memory=True) as profile:
        hash_index.find_or_insert(ids, buffers, 0, 0, False)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert 0 < allocated < 4 * ids.nbytes


@given(
    st.lists(st.tuples(st.lists(IDS, max_size=30), st.lists(IDS, max_size=30), st.integers(0, 5)), max_size=5),
    st.lists(IDS, max_size=5),
)
def test_find_tables_is_find_on_each_stretch(tables: list[tuple[list[int], list[int], int]], others: list[int]) -> None:
    pieces, begins, ends, built, dense = [torch.tensor(others, dtype=torch.int64)], [], [], [], []
    for held, asked, dense_rows in tables:
        buffers = empty(40 + dense_rows, dense_rows)
        hash_index.find_or_insert(torch.tensor(held, dtype=torch.int64), buffers, dense_rows, 0, True)
        begins.append(sum(piece.numel() for piece in pieces))
        pieces.append(torch.tensor(asked, dtype=torch.int64))
        ends.append(begins[-1] + len(asked))
        built.append(buffers)
        dense.append(dense_rows)
    ids = torch.cat(pieces)
    arguments = (ids, begins, ends, [b.slots for b in built], [b.side_row for b in built], dense)
    rows, absent = hash_index.find_tables(*arguments)
    wanted_rows, wanted_absent = hash_index.find_tables_reference(*arguments)
    assert torch.equal(rows, wanted_rows)
    assert torch.equal(absent, wanted_absent)
    assert rows[: len(others)].tolist() == others
    for begin, end, buffers, dense_rows in zip(begins, ends, built, dense, strict=True):
        alone = hash_index.find(ids[begin:end], buffers.slots, buffers.side_row, dense_rows)
        assert torch.equal(rows[begin:end], alone)


@pytest.mark.parametrize(("begins", "ends"), [([0], [6]), ([3], [2]), ([-1], [2]), ([0, 1], [1])])
def test_find_tables_refuses_stretches_that_do_not_fit(begins: list[int], ends: list[int]) -> None:
    buffers = empty(8)
    with pytest.raises(RuntimeError, match=r"find_tables|has ids"):
        torch.ops.recfx.find_tables(torch.arange(5), begins, ends, [buffers.slots], [buffers.side_row], [0])


def test_opcheck() -> None:
    buffers = empty(64, dense_rows=4, buckets=2)
    ids = torch.tensor([5, 2, -1, 5, 2**63 - 1])
    cases: list[tuple[str, tuple[object, ...]]] = [
        ("find", (ids, buffers.slots, buffers.side_row, 4)),
        ("find_tables", (ids, [1, 3], [3, 5], [buffers.slots] * 2, [buffers.side_row] * 2, [4, 0])),
        ("find_or_insert", (ids, *buffers, 4, 0, True)),
        ("erase", (ids[:2], *buffers, 4, 0)),
        ("rebuild", (*buffers, 4, 0)),
    ]
    for name, arguments in cases:
        torch.library.opcheck(getattr(torch.ops.recfx, name).default, arguments)


def test_scriptable() -> None:
    @torch.jit.script
    def use(ids: torch.Tensor, slots: torch.Tensor, side_row: torch.Tensor) -> torch.Tensor:
        return torch.ops.recfx.find(ids, slots, side_row, 2)

    buffers = empty(8, dense_rows=2)
    hash_index.find_or_insert(torch.tensor([9, -1]), buffers, 2, 0, False)
    assert use(torch.tensor([1, -1, 9, 10]), buffers.slots, buffers.side_row).tolist() == [1, 3, 2, -1]
    scripted = torch.jit.script(hash_index.find_reference)
    assert scripted(torch.tensor([1, -1, 9, 10]), buffers.slots, buffers.side_row, 2).tolist() == [1, 3, 2, -1]
    assert torch.jit.script(hash_index.shared_rows)(torch.tensor([5]), 8, 2, 2, 0).numel() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, "ids must have 1 dimension"),
        ({"ids": torch.zeros(2)}, "ids must be int64"),
        ({"slots": torch.full((12, 2), -1)}, "power of two"),
        ({"slots": torch.full((16, 3), -1)}, r"\[slots, 2\]"),
        ({"row_state": torch.zeros(3, dtype=torch.uint8)}, "row_state must be uint8"),
        ({"free_rows": torch.zeros(2, dtype=torch.int64)}, "free_rows must hold 1 words"),
        ({"slots": torch.full((8, 2), -1)}, "more slots than rows"),
    ],
)
def test_operators_check_what_they_are_given(change: dict[str, torch.Tensor], message: str) -> None:
    buffers = empty(10)
    ids = change.pop("ids", torch.arange(2))
    with pytest.raises(RuntimeError, match=message):
        torch.ops.recfx.find_or_insert(ids, *buffers._replace(**change), 0, 0, False)
