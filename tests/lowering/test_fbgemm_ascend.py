"""What the target ``fbgemm_ascend`` declines, and that it says why; and what it gives to the operator of the package.

A function stands in for that operator, so nothing here needs the package.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from recfx.hashing import HashConfig
from recfx.ir import TableSpec
from recfx.kernels.lookup.pooled_lookup_reference import pooled_lookup
from recfx.lowering import BACKENDS, LookupSpec
from recfx.lowering import _fbgemm_ascend_operator as operator
from recfx.lowering.step.aten_backward import AtenBackward
from recfx.lowering.step.trained_batch import TrainedBatch

(TARGET,) = (backend for backend in BACKENDS if backend.name == "fbgemm_ascend")


class Npu(NamedTuple):
    """Stands for a ``torch.device`` that torch does not know without torch_npu."""

    type: str = "npu"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As if the package were there, on a chip of the name that is given back."""
    chip = SimpleNamespace(name="Ascend910B3")
    monkeypatch.setattr(operator, "why_not", lambda: None)
    module = SimpleNamespace(get_device_name=lambda device: chip.name)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return chip


def tables(dims: tuple[int, ...], rows: int = 10) -> tuple[TableSpec, ...]:
    adopted = HashConfig().resolve(rows, adopt=True) if rows else None
    return tuple(
        TableSpec(f"t{number}", (f"f{number}",), (f"f{number}",), rows, dim, "SUM", adopted, 0.0, 0.0)
        for number, dim in enumerate(dims)
    )


def spec(dims: tuple[int, ...] = (8, 16), rows: int = 10, **changes: Any) -> Any:
    """A lookup whose weights say that they are on an NPU."""
    weights: list[Any] = [on_npu((rows, dim)) for dim in dims]
    return replace(LookupSpec(tables(dims, rows), "SUM", False, weights, [None] * len(dims)), **changes)


def on_npu(shape: tuple[int, int], dtype: torch.dtype = torch.float32, contiguous: bool = True) -> Any:
    return SimpleNamespace(device=Npu(), dtype=dtype, shape=shape, requires_grad=True, is_contiguous=lambda: contiguous)


def declined(wanted: Any) -> tuple[str, str]:
    found = TARGET.decline(wanted)
    assert found is not None
    assert (found.by, found.path) == ("fbgemm_ascend", "")
    return found.code, found.message


@pytest.mark.parametrize(
    ("wanted", "code", "said"),
    [
        (spec(weights=[torch.zeros(10, 8)] * 2), "device", "the tables are on cpu; this target is for npu"),
        (spec(weights=[on_npu((10, 8)), torch.zeros(10, 16)]), "device", "cpu/npu"),
        (spec(weights=[on_npu((10, 8), torch.float16), on_npu((10, 16))]), "dtype", "not torch.float16, torch.float32"),
        (spec(is_weighted=True), "per_sample_weights", "no lookup with per-sample weights"),
        (spec(weights=[on_npu((10, 8)), on_npu((10, 16), contiguous=False)]), "not_contiguous", "rows"),
        (spec(rows=0), "empty_table", "table 't0' has no rows"),
        (spec((8, 12)), "unaligned_columns", "a multiple of 8 columns, table 't1' has 12"),
        (spec((8, 1032)), "too_many_columns", "more than 1024 columns were never looked up"),
    ],
)
def test_what_it_does_not_serve(wanted: Any, code: str, said: str) -> None:
    found, message = declined(wanted)
    assert found == code
    assert said in message


def test_what_it_serves(installed: SimpleNamespace) -> None:
    for name in ("Ascend910B3", "Ascend910_9391", "Ascend950DT"):
        installed.name = name
        assert TARGET.decline(spec((8, 1024), rows=1)) is None
    installed.name = "Ascend310P3"
    code, message = declined(spec())
    assert code == "chip"
    assert "not for 'Ascend310P3'" in message


@pytest.mark.parametrize("reason", ["no_fbgemm_ascend", "no_operator", "operator_signature"])
def test_what_the_package_lacks_is_the_reason(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "why_not", lambda: operator.WhyNot(reason, "it is so."))
    assert declined(spec()) == (reason, "it is so.")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert operator.why_not() == ("no_fbgemm_ascend", "fbgemm_ascend is not installed.")


def test_the_operator_is_given_one_flat_table_and_offsets_per_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def pool(*arguments: Any, **named: Any) -> torch.Tensor:
        given.update(zip(operator._REQUIRED, arguments, strict=True), **named)
        return torch.ones(2, 16)

    monkeypatch.setattr(operator, "_operator", lambda: pool)
    weight, rows = torch.rand(10, 8, requires_grad=True), torch.tensor([1, 9, 0, 3, 3])
    offsets = torch.tensor([0, 2, 2, 3, 5])
    assert torch.equal(operator.pool_table(weight, rows, offsets, 2, "MEAN"), torch.ones(2, 16))
    table = given.pop("dev_weights")
    assert (table.shape, table.data_ptr(), table.requires_grad) == ((80,), weight.data_ptr(), False)
    found = {name: value.tolist() if torch.is_tensor(value) else value for name, value in given.items()}
    none: list[int] = []
    assert found == {
        "uvm_weights": none, "lxu_cache_weights": none, "lxu_cache_locations": none, "uvm_cache_stats": none,
        "weights_placements": [0, 0], "weights_offsets": [0, 0], "D_offsets": [0, 8, 16], "total_D": 16, "max_D": 8,
        "indices": [1, 9, 0, 3, 3], "offsets": [0, 2, 2, 3, 5], "offset_per_key": [0, 2, 5], "pooling_mode": 1,
        "output_dtype": 0, "is_experimental": False,
    }  # fmt: skip


@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_gradients_are_those_of_autograd(pooling: str) -> None:
    """Of the weights and of the per-sample weights, with empty bags and rows of -1."""
    torch.manual_seed(0)
    weights = [torch.randn(10, dim, requires_grad=True) for dim in (8, 16)]
    offsets, rows = torch.tensor([0, 2, 2, 3, 7]), torch.tensor([1, 1, -1, 9, 0, 3, 3])
    scale = torch.rand(7, requires_grad=True) if pooling == "SUM" else None
    wanted = _looked_up(weights, rows, offsets, pooling, scale)
    gradient = torch.randn(2, 24)
    wanted.backward(gradient)
    wanted_now = pooled_lookup(rows, offsets, [w.detach() for w in weights], [0, 1], pooling == "MEAN", _plain(scale))
    torch.testing.assert_close(wanted.detach(), wanted_now)
    backward = AtenBackward(LookupSpec(tables((8, 16)), pooling, scale is not None, [], [None, None]))
    batch = TrainedBatch(weights, rows, offsets, _plain(scale))
    both, second = (backward.weight_gradients(batch, gradient, which) for which in ([True, True], [False, True]))
    assert second[0] is None
    for found, weight in zip([*both, second[1]], [*weights, weights[1]], strict=True):
        torch.testing.assert_close(found, weight.grad)
    if scale is not None:
        torch.testing.assert_close(backward.scale_gradient(batch, gradient), scale.grad)


def _plain(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.detach()


def _looked_up(
    weights: list[torch.Tensor], rows: torch.Tensor, offsets: torch.Tensor, pooling: str, scale: torch.Tensor | None
) -> torch.Tensor:
    """Bag by bag."""
    bags = []
    for bag, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        weight = weights[bag // 2]
        present = [at for at in range(begin, end) if rows[at] >= 0]
        found = [weight[rows[at]] * (1 if scale is None else scale[at]) for at in present]
        total = torch.stack(found).sum(0) if found else torch.zeros(weight.shape[1])
        bags.append(total / (end - begin) if pooling == "MEAN" and end > begin else total)
    return torch.cat([torch.stack(bags[:2]), torch.stack(bags[2:])], dim=1)
