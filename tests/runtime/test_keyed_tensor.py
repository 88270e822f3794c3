"""The columns of pooled outputs: put together, and divided where they are means."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.modules.embedding_configs import PoolingType

import recfx
from recfx.ir.tables import Columns, TableSpec, columns_of
from recfx.runtime.assemble import ColumnOrder, MeanDivide
from tests.builders.batches import bags
from tests.builders.collections import table

CPU = torch.device("cpu")
A, B, C, D = Columns("a", 0, 1), Columns("b", 0, 2), Columns("c", 0, 3), Columns("d", 0, 4)


def part_of(*columns: Columns) -> torch.Tensor:
    """Two samples; the hundreds name the key, the tens the sample, the units the column."""
    return torch.cat(
        [
            torch.tensor([[100 * "abcd".index(part.key) + 10 * row + i for i in range(part.dim)] for row in range(2)])
            for part in columns
        ],
        dim=1,
    ).float()


@pytest.mark.parametrize(
    ("parts", "order", "pieces"),
    [
        ([[A, B], [C, D]], [A, B, C, D], 2),
        ([[C, D], [A, B]], [A, B, C, D], 2),
        ([[A, C], [B, D]], [A, B, C, D], 4),
        ([[B, A], [C]], [A, B, C], 3),
        ([[A, B, D], [C]], [A, B, C, D], 3),
        ([[A, C, D], [B]], [A, B, C, D], 3),
        ([[D, A, B, C]], [A, B, C, D], 2),
        ([[A], [B], [C, D]], [D, B, A, C], 4),
    ],
)
def test_columns_that_stay_adjacent_are_one_piece(
    parts: list[list[Columns]], order: list[Columns], pieces: int
) -> None:
    tensors = [part_of(*part).requires_grad_() for part in parts]
    joined = ColumnOrder(parts, order)(tensors, 2, CPU)
    assert joined.tolist() == part_of(*order).tolist()
    assert len(joined.grad_fn.next_functions) == pieces  # type: ignore[union-attr]
    joined.sum().backward()
    assert all((tensor.grad == 1).all() for tensor in tensors)  # type: ignore[union-attr]


def test_a_part_that_is_in_order_is_not_copied() -> None:
    part = part_of(A, B, C)
    assert ColumnOrder([[A, B, C]], [A, B, C])([part], 2, CPU) is part


@pytest.mark.parametrize(
    ("parts", "order", "pieces"),
    [
        ([[B]], [A, B, C, D], 3),
        ([[C]], [A, B, C], 2),
        ([[A], [D]], [A, B, C, D], 3),
        ([[A, D]], [A, B, C, D], 3),
        ([[B], [D]], [A, B, C, D], 4),
    ],
)
def test_columns_that_no_part_holds_are_zeros(parts: list[list[Columns]], order: list[Columns], pieces: int) -> None:
    tensors = [part_of(*part).requires_grad_() for part in parts]
    joined = ColumnOrder(parts, order)(tensors, 2, CPU)
    present = {columns for part in parts for columns in part}
    blocks = [part_of(part) if part in present else torch.zeros(2, part.dim) for part in order]
    assert joined.tolist() == torch.cat(blocks, dim=1).tolist()
    assert len(joined.grad_fn.next_functions) == pieces  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_zeros_are_of_the_type_of_the_parts(dtype: torch.dtype) -> None:
    assert ColumnOrder([[A]], [A, B])([part_of(A).to(dtype)], 2, CPU).dtype == dtype


@pytest.mark.parametrize(
    ("order", "dtype"),
    [
        ([], torch.float32),
        ([Columns("f", 0, 4)], torch.float32),
        ([Columns("f", 0, 4, torch.float16)], torch.float16),
        ([Columns("f", 0, 4, torch.float16), Columns("g", 0, 4)], torch.float32),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_rank_without_shards_sends_is_on_its_device(
    order: list[Columns], dtype: torch.dtype, device: str
) -> None:
    sent = ColumnOrder([], order)((), 3, torch.device(device))
    assert (sent.device.type, sent.dtype, tuple(sent.shape)) == (device, dtype, (3, 4 * len(order)))


def test_samples_that_nobody_has_columns_of() -> None:
    assert ColumnOrder([[]], [])([torch.zeros(2, 0)], 2, CPU).shape == (2, 0)


FEATURES = ("a", "b", "c", "d")
BAGS = bags({"a": [[1], [1, 2]], "b": [[1, 2, 3], []], "c": [[], [1, 2, 3, 4]], "d": [[5], [5] * 5]})


def tables() -> dict[str, TableSpec]:
    configs = [
        table(name, features, dim=dim, pooling=PoolingType.MEAN)
        for name, features, dim in (("one", ["a", "b"], 2), ("two", ["c"], 3), ("three", ["d"], 1))
    ]
    return {spec.name: spec for spec in recfx.HashEmbeddingBagCollection(configs).tables}


@pytest.mark.parametrize(
    ("order", "divided", "divisors"),
    [
        (["one", "two", "three"], ["one", "two", "three"], [[1, 1, 3, 3, 1, 1, 1, 1], [2, 2, 1, 1, 4, 4, 4, 5]]),
        (["one", "two", "three"], ["two"], [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 4, 4, 4, 1]]),
        (["one", "two", "three"], ["one"], [[1, 1, 3, 3, 1, 1, 1, 1], [2, 2, 1, 1, 1, 1, 1, 1]]),
        (["three", "two", "one"], ["one", "three"], [[1, 1, 1, 1, 1, 1, 3, 3], [5, 1, 1, 1, 2, 2, 1, 1]]),
        (["two"], ["two"], [[1, 1, 1], [4, 4, 4]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_are_divided_by_the_lengths_of_their_bags(
    order: list[str], divided: list[str], divisors: list[list[int]], dtype: torch.dtype
) -> None:
    specs = tables()
    chosen = tuple(specs[name] for name in order)
    node = MeanDivide(chosen, tuple(divided), FEATURES, columns_of(chosen))
    pooled = torch.rand(2, len(divisors[0]), dtype=dtype)
    means = node(pooled, BAGS)
    assert means.dtype == dtype
    assert torch.equal(means, pooled / torch.tensor(divisors))


class CountsDivisions(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[type-arg]
        if "div" in str(func):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def test_columns_that_are_not_divided_are_left_alone_in_one_piece() -> None:
    specs = tables()
    chosen = (specs["three"], specs["one"], specs["two"])
    node = MeanDivide(chosen, ("two",), FEATURES, columns_of(chosen))
    pooled = torch.rand(2, 8, requires_grad=True)
    with CountsDivisions() as counted:
        joined = node(pooled, BAGS)
    assert counted.shapes == [(2, 3)]
    assert len(joined.grad_fn.next_functions) == 2
