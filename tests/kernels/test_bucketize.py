"""Ids routed to pieces of tables: C++ against the reference, and against who owns an id."""

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from recfx.hashing import HashConfig, HashIndex
from recfx.hashing.slices import row_cuts
from recfx.kernels.route.bucketize import WHOLE, Routes, bucketize
from tests.kernels.routes import batches, by_reference, cut_equally
from tests.support.references import references


@settings(max_examples=80)
@given(batches())
def test_operator_equals_reference(case: tuple[torch.Tensor, torch.Tensor, int, Routes, torch.Tensor | None]) -> None:
    for got, expected in zip(bucketize(*case), by_reference(*case), strict=True):
        if expected is None:
            assert got is None
            continue
        assert got is not None
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("pieces", [1, 2, 5, 8, 9, 60, 160])
@pytest.mark.parametrize("buckets", [0, 64, 77])
def test_large_batches(buckets: int, pieces: int, threads: int) -> None:
    """Several tasks a feature; bags too long for counters in one register."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 40, (3 * 500,), generator=generator)
    lengths[700] = 70_000
    ids = torch.randint(0, 1000, (int(lengths.sum()),), generator=generator)
    cut = [0, *sorted(torch.randint(0, 1000, (pieces - 1,), generator=generator).tolist()), 1000]
    sources, entries = [f for f in range(3) for _ in range(pieces)], list(range(pieces)) * 3
    routes = Routes([cut] * 3, [100 if buckets else 0] * 3, [1000] * 3, [buckets] * 3, [0, 1, 2], sources, entries)
    weights = torch.rand(ids.numel(), generator=generator)
    torch.set_num_threads(threads)
    got = bucketize(ids, lengths, 500, routes, weights)
    for left, right in zip(got, by_reference(ids, lengths, 500, routes, weights), strict=True):
        assert left is not None
        assert right is not None
        assert torch.equal(left, right)


@pytest.mark.parametrize(("pieces", "counted"), [(8, 2**8), (5, 2**12)])
def test_bags_whose_ids_all_go_to_one_piece(pieces: int, counted: int) -> None:
    """As many as a part of a register can count, one more, and two more."""
    nothing, every = [0], list(range(pieces))
    rows, cuts = [10 * pieces], [cut_equally(10 * pieces, pieces)]
    routes = Routes(cuts, nothing, rows, nothing, nothing, nothing * pieces, every)
    expected = torch.zeros(pieces, 3, dtype=torch.int64)
    for piece in every:
        lengths = torch.tensor([counted - 1, counted, counted + 1])
        ids = torch.full((3 * counted,), 10 * piece)
        expected.zero_()[piece] = lengths
        assert torch.equal(bucketize(ids, lengths, 3, routes)[1].view(pieces, 3), expected)


@pytest.mark.parametrize("dense_rows", [0, 50])
@pytest.mark.parametrize("pieces", [2, 3, 5])
def test_ids_go_to_the_slice_that_holds_them(pieces: int, dense_rows: int) -> None:
    config = HashConfig(dense_rows=dense_rows, buckets=6, seed=3).resolve(200, False)
    cuts = row_cuts(config, pieces)
    ids = torch.cat([torch.arange(-50, 200), torch.arange(2**40, 2**40 + 99)])
    routes = Routes([cuts], [dense_rows], [200], [6], [3], [0] * pieces, list(range(pieces)))
    got, lengths, _ = bucketize(ids, torch.tensor([ids.numel()]), 1, routes)
    for (begin, end), own in zip(itertools.pairwise(cuts), got.split(lengths.tolist()), strict=True):
        index = HashIndex(200, config=config, row_begin=begin, row_end=end)
        assert torch.equal(own, ids[index.holds(ids)])
        assert own.numel() > 0


def test_whole_features_and_column_shards() -> None:
    """Feature 0 is not cut and goes to two ranks; feature 1 is cut in two, and its first piece goes to two."""
    routes = Routes(
        [[], [0, 5, 10]], [0, 0], [0, 10], [0, 0], [0, 0], [0, 1, 1, 0, 1, 1], [WHOLE, 0, 1, WHOLE, 0, WHOLE]
    )
    ids = torch.tensor([70, -8, 70, 9, 0, 4, 5])
    lengths = torch.tensor([1, 2, 1, 3], dtype=torch.int32)
    got, got_lengths, weights = bucketize(ids, lengths, 2, routes, ids.double())
    assert got_lengths.tolist() == [1, 2, 0, 2, 1, 1, 1, 2, 0, 2, 1, 3]
    assert got_lengths.dtype == torch.int32
    assert got.tolist() == [70, -8, 70, 0, 4, 4, 0, 70, -8, 70, 0, 4, 9, 0, 4, 5]
    assert weights is not None
    assert weights.tolist() == [70, -8, 70, 0, 4, 9, 5, 70, -8, 70, 0, 4, 9, 0, 4, 5]


@pytest.mark.parametrize("with_library", [True, False])
@pytest.mark.parametrize("bad", [-1, 10, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("cut", [[0, 5, 10], list(range(0, 11)), [0] * 40 + [10]])
def test_ids_out_of_range_are_refused(cut: list[int], bad: int, with_library: bool) -> None:
    routes = Routes([[], cut, cut], [0] * 3, [0, 10, 10], [0] * 3, [0] * 3, [0, 1, 2, 2], [WHOLE, 0, 0, 1])
    ids = torch.arange(9).repeat(30_000)[:240_000]
    ids[[200_000, 230_001]] = bad
    lengths = torch.full((3 * 8,), 10_000)
    with (
        nullcontext() if with_library else references(),
        pytest.raises(IndexError, match=f"id {bad} of feature 2 is outside its 10 rows"),
    ):
        bucketize(ids, lengths, 8, routes, ids.float())
    ids[5] = bad
    ids[[200_000, 230_001]] = 0
    assert torch.equal(bucketize(ids, lengths, 8, routes)[0][:80_000], ids[:80_000]), (
        "whoever is not cut is not looked at"
    )


ROUTES = Routes([[0, 5, 10]], [0], [10], [0], [0], [0, 0], [0, 1])
OF_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"lengths": torch.tensor([1, 2])}, "lengths must"),
    ({"lengths": torch.tensor([4])}, "ids"),
    ({"lengths": torch.tensor([-3])}, "ids"),
    ({"weights": torch.rand(2)}, "weights must"),
    ({"routes": ROUTES._replace(row_borders=[[0, 11, 10]])}, "must ascend from 0"),
    ({"routes": ROUTES._replace(row_borders=[[1, 5, 10]])}, "must ascend from 0"),
    ({"routes": ROUTES._replace(pieces=[0, 2])}, "has no piece 2"),
    ({"routes": ROUTES._replace(sources=[0, 1])}, "no feature 1|feature 1 has"),
]
OF_OPERATOR: list[tuple[dict[str, Any], str]] = [
    ({"ids": torch.arange(3).int()}, "ids must be int64"),
    ({"lengths": torch.tensor([3.0])}, "lengths must be int64 or int32"),
    ({"weights": torch.arange(3).short()}, "weights must be floats, int32 or int64"),
    ({"routes": ROUTES._replace(buckets=[11])}, "has 11 buckets in 10 rows"),
    ({"routes": ROUTES._replace(seeds=[])}, "one entry per feature"),
    ({"lengths": torch.tensor([2**62, 2**62, 2**62, 2**62 + 3]), "batch_size": 4}, "must add up to"),
]


@pytest.mark.parametrize(
    ("change", "message", "with_library"),
    [*((*case, True) for case in OF_BOTH + OF_OPERATOR), *((*case, False) for case in OF_BOTH)],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str, with_library: bool) -> None:
    given = {"ids": torch.arange(3), "lengths": torch.tensor([3]), "batch_size": 1, "routes": ROUTES, **change}
    with nullcontext() if with_library else references(), pytest.raises(RuntimeError, match=message):
        bucketize(**given)


def test_opcheck() -> None:
    ids, lengths = torch.tensor([3, 7, -5]), torch.tensor([1, 1, 0, 1])
    lists = ([0, 4, 10, 0, 6, 10], [3, 3], [0, 2], [10, 10], [0, 4], [0, 0], [0, 1, 1, 0], [-1, 0, 1, 1])
    for weights in (None, torch.rand(3)):
        torch.library.opcheck(torch.ops.recfx.bucketize.default, (ids, lengths, 2, *lists, weights))
