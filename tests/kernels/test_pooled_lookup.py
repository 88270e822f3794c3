"""The C++ operators against the ATen references, and against each other where bits must be equal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.hashing import HashIndex
from recfx.kernels.index.index_buffers import IndexView
from recfx.kernels.lookup import pooled_lookup_reference
from recfx.kernels.lookup.pooled_lookup import find_and_pool, pool_again_, pooled_lookup
from tests.kernels.pooled import Case, cases
from tests.kernels.threads import assert_same_on_any_threads


@settings(max_examples=200)
@given(cases())
def test_find_and_pool_equals_its_reference(case: Case) -> None:
    pooled, rows, absent = case.by_operator()
    expected_pooled, expected_rows, expected_absent = case.by_reference()
    assert torch.equal(rows, expected_rows)
    assert torch.equal(absent, expected_absent)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, expected_pooled, rtol=1e-5, atol=1e-4)
    again = pooled_lookup(rows, case.offsets, case.weights, case.table_of_feature, False, case.scale, case.unpooled)
    assert torch.equal(pooled, case.joined(again)), "finding changes the order of the sums"
    without_rows = case.by_operator(keep_rows=False)
    assert torch.equal(without_rows[0], pooled)
    assert without_rows[1].numel() == 0
    assert torch.equal(without_rows[2], absent)


@settings(max_examples=100)
@given(cases(), st.booleans())
def test_pooled_lookup_equals_its_reference(case: Case, mean: bool) -> None:
    _, rows, _ = case.by_reference()
    mean = mean and not case.unpooled
    scale = None if mean else case.scale
    arguments = (rows, case.offsets, case.weights, case.table_of_feature, mean, scale, case.unpooled)
    expected, actual = pooled_lookup_reference.pooled_lookup(*arguments), case.joined(pooled_lookup(*arguments))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    if case.unpooled:
        assert torch.equal(actual, expected), "a row is not what it was"


@settings(max_examples=100)
@given(cases(), st.floats(0, 1), st.integers(0, 100))
def test_pooling_again_gives_the_bits_of_the_final_rows(case: Case, share: float, seed: int) -> None:
    _, final, _ = case.by_operator()
    changed = torch.rand(final.shape, generator=torch.Generator().manual_seed(seed)) < share
    before = torch.where(changed, torch.full_like(final, -1), final)
    arguments = (case.offsets, case.weights, case.table_of_feature)
    pooled = pooled_lookup(before, *arguments, False, case.scale, case.unpooled)
    expected = pooled_lookup(final, *arguments, False, case.scale, case.unpooled)
    pool_again_(pooled, final, changed, *arguments, case.scale, case.unpooled)
    assert torch.equal(case.joined(pooled), case.joined(expected))


def test_pooling_again_leaves_other_bags_alone() -> None:
    weight = torch.randn(10, 5)
    rows, offsets = torch.arange(8), torch.tensor([0, 3, 3, 5, 8])
    pooled = torch.full((4, 5), 7.0)
    changed = torch.tensor([False, False, False, False, True, False, False, False])
    pool_again_([pooled], rows, changed, offsets, [weight], [0])
    assert torch.equal(pooled[[0, 1, 3]], torch.full((3, 5), 7.0))
    torch.testing.assert_close(pooled[2], weight[3] + weight[4])


def large_case(dtype: torch.dtype, unpooled: bool = False) -> Case:
    """Enough ids for many tasks, most of them held, some absent, ragged bags."""
    weights = [torch.randn(2000, dim).to(dtype) for dim in (20, 20 if unpooled else 64)]
    views, parts, sizes = [], [], []
    for _ in weights:
        index = HashIndex(2000)
        index.find_or_insert(torch.arange(1000) * 12345)
        views.append(IndexView(index.slot_groups, index.side_row, 0, 0, 0))
        lengths = torch.randint(0, 30, (500,))
        sizes.append(lengths)
        parts.append(torch.randint(0, 1100, (int(lengths.sum()),)) * 12345)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(sizes).cumsum(0)])
    offsets = offsets[::500] if unpooled else offsets
    return Case(weights, [0, 1], offsets, None, views, torch.cat(parts), unpooled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("unpooled", [False, True])
def test_results_do_not_depend_on_threads(dtype: torch.dtype, unpooled: bool) -> None:
    case = large_case(dtype, unpooled)
    _, _, absent = assert_same_on_any_threads(case.by_operator)
    assert int(absent.min()) > 0, "nothing was absent: the case is too easy"


def test_every_float16_is_read_exactly() -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    weight = bits.view(torch.float16).view(-1, 1).expand(-1, 20).contiguous()  # 20 columns: wide and narrow vectors
    (pooled,) = pooled_lookup(torch.arange(2**16), torch.arange(2**16 + 1), [weight], [0])
    assert torch.equal(pooled.isnan(), weight.isnan())
    assert torch.equal(pooled.nan_to_num(), weight.float().nan_to_num())


def test_opcheck() -> None:
    weights = [torch.randn(30, 5), torch.randn(30, 8)]
    index = HashIndex(30)
    index.find_or_insert(torch.tensor([5, -1]))
    empty = IndexView.none()
    ids, offsets = torch.tensor([5, -1, 9, 3, 4]), torch.tensor([0, 2, 3, 3, 5])
    scale, changed = torch.rand(5), torch.tensor([False, True, False, False, False])
    rows, tables = torch.arange(5), [0, 1]
    borders, alike = torch.tensor([0, 3, 5]), [weights[0], torch.randn(30, 5)]  # not pooled
    views = ([index.slot_groups, empty.slot_groups], [index.side_row, empty.side_row], [0, 0], [1, 0], [0, 0])
    finding = (ids, offsets, weights, tables, *views, [0, 40], [0, 5], [index.lock], scale)
    for name, arguments in (
        ("pooled_lookup", (rows, offsets, weights, tables, False, scale)),
        ("pooled_lookup", (rows, offsets, weights, tables, True, None)),
        ("find_and_pool", finding),
        ("find_and_pool", (*finding, False)),
        ("pool_again_", ([torch.zeros(2, 13)], rows, changed, offsets, weights, tables, scale)),
        ("pooled_lookup", (rows, borders, alike, tables, False, None, True)),
        ("find_and_pool", (ids, borders, alike, *finding[3:-1], None, False, True)),
        ("pool_again_", ([torch.zeros(3, 5), torch.zeros(2, 5)], rows, changed, borders, alike, tables, None, True)),
    ):
        torch.library.opcheck(getattr(torch.ops.recfx, name).default, arguments)


def test_scriptable() -> None:
    @torch.jit.script
    def use(rows: torch.Tensor, offsets: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        return torch.ops.recfx.pooled_lookup(rows, offsets, weights, [0], False, None)[0]

    weights = [torch.randn(4, 3)]
    pooled = use(torch.tensor([0, 2]), torch.tensor([0, 2]), weights)
    torch.testing.assert_close(pooled[0], weights[0][0] + weights[0][2])
    torch.jit.script(pooled_lookup_reference.pooled_lookup)


ROWS, OFFSETS, WEIGHTS = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 2, 4]), [torch.zeros(3, 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ROWS.float()}, "rows must be int64"),
        ({"offsets": OFFSETS.int()}, "offsets must be int64"),
        ({"offsets": torch.tensor([0, 2, 5])}, "offsets must ascend within the 4 ids"),
        ({"table_of_feature": [0, 0, 0]}, "offsets must be"),
        ({"table_of_feature": [1]}, "no table 1"),
        ({"weights": [torch.zeros(3, 2).double()]}, "weights must be"),
        ({"per_sample_weights": torch.zeros(3)}, "per_sample_weights must be"),
        ({"per_sample_weights": torch.zeros(4), "mean": True}, "not for means"),
        ({"unpooled": True}, r"without pooling, offsets must be \[F \+ 1\]"),
        ({"unpooled": True, "offsets": torch.tensor([0, 3])}, "from 0 to the 4 ids"),
        ({"unpooled": True, "offsets": torch.tensor([0, 4]), "mean": True}, "neither means nor"),
    ],
)
def test_pooled_lookup_checks_what_it_is_given(change: dict[str, object], message: str) -> None:
    arguments = {"rows": ROWS, "offsets": OFFSETS, "weights": WEIGHTS, "table_of_feature": [0], **change}
    with pytest.raises(RuntimeError, match=message):
        pooled_lookup(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (IndexView(torch.full((3, 2), -1), torch.tensor([-1]), 0, 0, 0), r"must be \[groups, 8\]"),
        (IndexView(torch.full((1, 8), -1), torch.tensor([-1, 0]), -1, 0, 0), "dense rows"),
        (IndexView(torch.full((1, 8), -1), torch.tensor([-1, 0]), 1, 3, 0), "shares 3 buckets"),
    ],
)
def test_find_and_pool_checks_its_indexes(view: IndexView, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        find_and_pool(ROWS, OFFSETS, WEIGHTS, [0], [view])


@pytest.mark.parametrize(
    ("outputs", "changed", "message"),
    [
        ([torch.zeros(2, 3)], torch.zeros(4, dtype=torch.bool), "output 0 must be"),
        ([torch.zeros(2, 2)] * 2, torch.zeros(4, dtype=torch.bool), "the lookup has 1 outputs, got 2"),
        ([torch.zeros(2, 2)], torch.zeros(3, dtype=torch.bool), "changed must be"),
    ],
)
def test_pool_again_checks_what_it_is_given(outputs: list[torch.Tensor], changed: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        pool_again_(outputs, ROWS, changed, OFFSETS, WEIGHTS, [0])
