import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recfx.kernels.index.mix64 import mix64_integer, to_int64
from recfx.kernels.step import row_initialization
from recfx.kernels.step.row_initialization import initial_rows, initialization_key, initialize_rows
from tests.support.references import ByReferences

INT64 = st.integers(-(2**63), 2**63 - 1)
KEY = initialization_key("table", 0)


def test_key_distinguishes_tables_and_seeds() -> None:
    keys = {initialization_key(name, seed) for name in ("t1", "t2", "") for seed in (0, 1, -1)}
    assert len(keys) == 9
    # First 8 bytes of sha256 of nothing: the key is part of what a checkpoint means, it must never change.
    assert initialization_key("", 0) == int.from_bytes(bytes.fromhex("e3b0c44298fc1c14"), "little", signed=True)


def test_definition() -> None:
    id_, dim, low, high = -5, 3, -0.25, 0.5
    got = initial_rows(torch.tensor([id_]), dim, KEY, low, high)
    for j in range(dim):
        bits = mix64_integer(to_int64(mix64_integer(to_int64(id_ ^ KEY)) + (j + 1) * 0x9E3779B97F4A7C15))
        uniform = (bits % 2**64 >> 40) / 2**24
        assert got[0, j].item() == pytest.approx(low + (high - low) * uniform, abs=1e-7)


def test_uniform_and_independent() -> None:
    rows = initial_rows(torch.arange(4000), 16, KEY, -1.0, 1.0).double()
    assert rows.min() >= -1
    assert rows.max() < 1
    count = rows.numel()
    assert abs(rows.mean().item()) < 4 / math.sqrt(3 * count)
    histogram = torch.histc(rows, bins=16, min=-1, max=1)
    assert ((histogram - count / 16) ** 2 / (count / 16)).sum() < 45, "chi-squared with 15 degrees of freedom"
    assert (torch.corrcoef(rows.T) - torch.eye(16)).abs().max() < 5 / math.sqrt(4000)
    assert not torch.equal(rows, initial_rows(torch.arange(4000), 16, initialization_key("other", 0), -1.0, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(ids=st.lists(INT64, unique=True, min_size=1, max_size=30), dim=st.integers(1, 70), key=INT64, data=st.data())
def test_operator_has_the_bits_of_the_reference(
    dtype: torch.dtype, ids: list[int], dim: int, key: int, data: st.DataObject
) -> None:
    low = data.draw(st.floats(-10, 10))
    high = data.draw(st.floats(low, 11))
    id_tensor = torch.tensor(ids)
    rows = torch.randperm(len(ids) + 3)[: len(ids)]
    weight = torch.full((len(ids) + 3, dim), 7.0, dtype=dtype)
    expected = weight.clone().index_copy_(0, rows, initial_rows(id_tensor, dim, key, low, high).to(dtype))
    torch.ops.recfx.init_rows_(weight, rows, id_tensor, key, low, high)
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("operators", [row_initialization, ByReferences(row_initialization)])
def test_shards_of_columns_have_the_bits_of_the_whole(dtype: torch.dtype, operators: Any) -> None:
    rows, ids = torch.tensor([2, 0, 3]), torch.tensor([5, -(2**63), 2**40])
    whole = torch.zeros(4, 70, dtype=dtype)
    operators.initialize_rows(whole, rows, ids, KEY, -1.0, 1.0)
    for begin, end in ((0, 70), (0, 1), (7, 23), (64, 70), (69, 70)):
        shard = torch.zeros(4, end - begin, dtype=dtype)
        operators.initialize_rows(shard, rows, ids, KEY, -1.0, 1.0, first_column=begin)
        assert torch.equal(shard, whole[:, begin:end])
        assert torch.equal(initial_rows(ids, end - begin, KEY, -1.0, 1.0, begin).to(dtype), shard[rows])


def test_there_is_no_column_before_the_first() -> None:
    with pytest.raises(RuntimeError, match="first_column must not be negative, got -1"):
        initialize_rows(torch.zeros(2, 2), torch.tensor([0]), torch.tensor([5]), KEY, 0.0, 1.0, first_column=-1)


@pytest.mark.parametrize("operators", [row_initialization, ByReferences(row_initialization)])
def test_autograd_version_stays(operators: Any) -> None:
    """Rows are initialised inside forward, after which backward must still find its saved weight unchanged."""
    weight = torch.nn.Parameter(torch.ones(4, 2))
    version = weight._version
    loss = (weight * weight).sum()  # saves weight
    operators.initialize_rows(weight, torch.tensor([3]), torch.tensor([11]), KEY, 2.0, 3.0)
    assert weight._version == version
    loss.backward()
    with torch.no_grad():
        assert (weight[3] >= 2).all()
        assert (weight[:3] == 1).all()
    assert weight.requires_grad
    assert weight.is_leaf


@pytest.mark.parametrize("operators", [row_initialization, ByReferences(row_initialization)])
def test_weights_that_are_views_or_in_pieces(operators: Any) -> None:
    block = torch.zeros(6, 8)
    operators.initialize_rows(block[1:5, 2:5], torch.tensor([1, 0]), torch.tensor([5, 6]), KEY, 1.0, 2.0)
    expected = initial_rows(torch.tensor([6, 5]), 3, KEY, 1.0, 2.0)
    assert torch.equal(block[1:3, 2:5], expected)
    assert int((block != 0).sum()) == 6
    transposed = torch.zeros(3, 4).T  # the numbers of a row are apart
    operators.initialize_rows(transposed, torch.tensor([1]), torch.tensor([5]), KEY, 1.0, 2.0)
    assert torch.equal(transposed[1], expected[1])
    negated = torch._neg_view(torch.zeros(4, 3))
    operators.initialize_rows(negated, torch.tensor([1]), torch.tensor([5]), KEY, 1.0, 2.0)
    assert torch.equal(negated[1], expected[1])


def test_bad_row_writes_nothing() -> None:
    weight = torch.zeros(4, 2)
    with pytest.raises(RuntimeError, match="row 4 is outside a weight of 4 rows"):
        initialize_rows(weight, torch.tensor([0, 4]), torch.tensor([5, 6]), KEY, 1.0, 2.0)
    assert (weight == 0).all()


def test_opcheck_and_script() -> None:
    arguments = (torch.zeros(4, 2), torch.tensor([1, 2]), torch.tensor([5, 6]), KEY, -1.0, 1.0)
    for more in ((), (3,)):
        torch.library.opcheck(torch.ops.recfx.init_rows_.default, (*arguments, *more))

    @torch.jit.script
    def use(weight: torch.Tensor, ids: torch.Tensor, key: int) -> torch.Tensor:
        torch.ops.recfx.init_rows_(weight, ids, ids, key, 0.0, 1.0)
        return weight

    ids = torch.tensor([0, 1])
    assert torch.equal(use(torch.zeros(2, 3), ids, KEY), torch.jit.script(initial_rows)(ids, 3, KEY, 0.0, 1.0))
