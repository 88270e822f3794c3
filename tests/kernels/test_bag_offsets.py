from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

from recfx.kernels.lookup.bag_offsets import (
    NEGATIVE_LENGTH,
    OUT_OF_RANGE,
    WRONG_TOTAL,
    Fault,
    bag_offsets,
    bag_offsets_reference,
)
from recfx.kernels.route.from_zero import from_zero
from tests.kernels.bags import batches, plain
from tests.support.references import references


@given(batches())
def test_equals_a_plain_loop(batch: tuple[Any, ...]) -> None:
    values, bags, are_offsets, per_key, rows, ids, bags_dtype = batch
    offsets, (kind, position) = plain(values, bags, are_offsets, per_key, rows)
    arguments = (
        torch.tensor(values, dtype=ids), torch.tensor(bags, dtype=bags_dtype), are_offsets, per_key,
        torch.tensor(rows, dtype=torch.int64),
    )  # fmt: skip
    checked, fault, _ = bag_offsets(*arguments)
    referred, reference_fault = bag_offsets_reference(*arguments)
    assert fault == (Fault(kind, position) if kind else None)
    assert reference_fault.tolist() == [kind, position]
    if offsets:
        assert checked.tolist() == referred.tolist() == offsets
    if len(set(per_key)) == 1:
        same = bag_offsets(arguments[0], arguments[1], are_offsets, per_key[:1], arguments[4])
        assert (same[0].tolist(), same[1]) == (checked.tolist(), fault)


@pytest.mark.parametrize("last", [2**31 - 2, 2**31 - 1, 2**40])
def test_sums_are_exact_on_both_sides_of_int32(last: int) -> None:
    assert from_zero(torch.tensor([1, last]), last + 1).tolist() == [0, 1, last + 1]


@pytest.mark.parametrize(
    ("ids", "bags", "dtype", "fault"),
    [
        # The sums of these lengths are the number of ids, in int64 and in int32.
        (3, [2**62] * 4 + [3], torch.int64, WRONG_TOTAL),
        (3, [2**31 - 1, 2**31 - 1, 5], torch.int32, WRONG_TOTAL),
        # The differences of these offsets are -1, 1 and less than 0.
        *((ids, [-(2**63), 2**63 - 1], None, WRONG_TOTAL) for ids in (0, 1)),
        *((ids, [2**63 - 1, -(2**63)], None, NEGATIVE_LENGTH) for ids in (0, 1)),
        *((ids, [-2, 2**63 - 1], None, WRONG_TOTAL) for ids in (0, 1)),
    ],
)
def test_numbers_that_wrap_around(ids: int, bags: list[int], dtype: torch.dtype | None, fault: int) -> None:
    """Lengths have a dtype here, offsets have none."""
    count = 1 if dtype is None else len(bags)
    given = torch.tensor(bags, dtype=dtype), dtype is None, [count], torch.full((1,), 5)
    values = torch.zeros(ids, dtype=torch.int64)
    assert bag_offsets(values, *given)[1] == (fault, 0)
    assert bag_offsets_reference(values, *given)[1].tolist() == [fault, 0]


@pytest.mark.parametrize("bad", [0, 511, 512, 99_999, 131_072, 199_999])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_first_of_many_across_threads(bad: int, dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (200_000,), dtype=dtype)
    lengths = torch.tensor([50_000, 0, 81_072, 68_928])
    arguments = (values, lengths, False, [1], torch.full((4,), 100))
    assert bag_offsets(*arguments)[1] is None
    values[bad] = 100
    values[-1] = -1
    assert bag_offsets(*arguments)[1] == (OUT_OF_RANGE, bad)
    assert bag_offsets_reference(*arguments)[1].tolist() == [OUT_OF_RANGE, bad]


class Waits(TorchDispatchMode):
    """Refuses what would make the host wait for a device: numbers for Python, and results as long as the data say."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, index = func.name(), args[1] if func.name() == "aten::index.Tensor" else ()
        waits = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::bincount")
        assert name not in waits
        assert not name.startswith("aten::repeat_interleave") or (kwargs or {}).get("output_size") is not None
        assert all(indices is None or indices.dtype != torch.bool for indices in index)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("values", [[1, 2, 9], [1, 2, 3], [1, 2]], ids=["bad", "good", "too_few"])
def test_the_reference_waits_for_nothing(values: list[int]) -> None:
    """But its caller reads the fault."""
    for are_offsets, bags in ((False, [1, 2]), (True, [0, 1, 3]), (False, [-1, 4])):
        with Waits():
            bag_offsets_reference(torch.tensor(values), torch.tensor(bags), are_offsets, [1], torch.tensor([5, 5]))


@pytest.mark.parametrize("with_library", [True, False])
@pytest.mark.parametrize("per_key", [[2], [1, 1, 1], [1], [4, -1]])
def test_bags_that_are_not_those_of_the_keys(with_library: bool, per_key: list[int]) -> None:
    with nullcontext() if with_library else references(), pytest.raises(RuntimeError, match="bags_per_key must"):
        bag_offsets(torch.zeros(3, dtype=torch.int64), torch.tensor([1, 1, 1]), False, per_key, torch.tensor([1, 1]))


@pytest.mark.parametrize("position", [0, 1, 4])
def test_operator_checks_dtypes(position: int) -> None:
    arguments: list[Any] = [torch.tensor([0, 0, 0]), torch.tensor([1, 2]), False, [1], torch.tensor([1, 1])]
    arguments[position] = arguments[position].double()
    with pytest.raises(RuntimeError, match="must be int64"):
        torch.ops.recfx.bag_offsets(*arguments)


def test_opcheck_and_script() -> None:
    for are_offsets, bags in ((False, [1, 2]), (True, [0, 1, 3])):
        arguments = (torch.tensor([1, 2, 9]), torch.tensor(bags), are_offsets, [1], torch.tensor([5, 5]))
        torch.library.opcheck(torch.ops.recfx.bag_offsets.default, arguments)

    @torch.jit.script
    def use(values: torch.Tensor, bags: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.recfx.bag_offsets(values, bags, True, [1], rows)[1]

    assert use(arguments[0], arguments[1], arguments[4]).tolist() == [OUT_OF_RANGE, 2]
    scripted = torch.jit.script(bag_offsets_reference)
    assert scripted(*arguments)[1].tolist() == [OUT_OF_RANGE, 2]
