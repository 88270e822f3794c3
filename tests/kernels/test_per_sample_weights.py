"""The gradient of per-sample weights in C++ against the reference in ATen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients, per_sample_weight_gradients_reference
from tests.kernels.threads import assert_same_on_any_threads

DIMS = st.sampled_from([1, 3, 15, 16, 17, 20, 32, 64, 100, 130])


@settings(max_examples=100)
@given(
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    dims=st.lists(DIMS, min_size=1, max_size=3),
    twice=st.booleans(),
    batch_size=st.integers(0, 9),
    longest=st.sampled_from([0, 1, 4, 60]),
    seed=st.integers(0, 1000),
)
def test_it_equals_its_reference(
    dtype: torch.dtype, dims: list[int], twice: bool, batch_size: int, longest: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(20, dim, generator=generator).to(dtype) for dim in dims]
    table_of_feature = [0] * twice + list(range(len(dims)))
    lengths = torch.randint(0, longest + 1, (len(table_of_feature) * batch_size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = torch.randint(-1, 20, (int(offsets[-1]),), generator=generator)
    gradients = torch.randn(batch_size, sum(dims[table] for table in table_of_feature), generator=generator)
    arguments = (rows, offsets, gradients, weights, table_of_feature)
    actual = per_sample_weight_gradients(*arguments)
    expected = per_sample_weight_gradients_reference(*arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # sums of up to 130 products, in another order


def test_any_number_of_threads_gives_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(500, 33, generator=generator)]
    rows = torch.randint(-1, 500, (30_000,), generator=generator)
    arguments = (rows, torch.arange(0, 30_001, 3), torch.randn(10_000, 33, generator=generator), weights, [0])
    assert_same_on_any_threads(lambda: [per_sample_weight_gradients(*arguments)], (1, 2, 5))


@pytest.mark.parametrize(
    ("rows", "offsets", "gradients", "message"),
    [
        (torch.tensor([1.0]), torch.tensor([0, 1]), torch.zeros(1, 4), "rows must be int64"),
        (torch.tensor([1]), torch.tensor([0, 2]), torch.zeros(1, 4), "offsets must ascend"),
        (torch.tensor([1]), torch.tensor([0, 1]), torch.zeros(1, 5), "gradients must be contiguous float32"),
    ],
)
def test_wrong_arguments_are_refused(
    rows: torch.Tensor, offsets: torch.Tensor, gradients: torch.Tensor, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        per_sample_weight_gradients(rows, offsets, gradients, [torch.zeros(3, 4)], [0])


@pytest.mark.parametrize("ids", [3, 30_000])
def test_a_row_beyond_the_end_of_its_table_is_refused(ids: int) -> None:
    """In one task and in many; 3 is the first row that the second table has not."""
    rows = torch.ones(2 * ids, dtype=torch.int64)
    rows[ids:][ids // 2] = 3
    tables, gradients = [torch.zeros(4, 4), torch.zeros(3, 4)], torch.zeros(ids, 8)
    message = "row 3 is beyond the end of table 1, which has 3 rows"
    with pytest.raises(IndexError, match=message):
        per_sample_weight_gradients(rows, torch.arange(2 * ids + 1), gradients, tables, [0, 1])


def test_opcheck() -> None:
    arguments = (torch.tensor([1, -1]), torch.tensor([0, 2]), torch.zeros(1, 4), [torch.zeros(3, 4)], [0])
    torch.library.opcheck(torch.ops.recfx.per_sample_weight_gradients.default, arguments)
