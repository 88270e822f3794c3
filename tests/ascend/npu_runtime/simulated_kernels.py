"""References in the place of the kernels in Triton, on a simulated NPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from recfx.kernels.build import launch
from recfx.kernels.index.find_rows import ReadIndexes, find_rows_reference, find_rows_triton
from recfx.kernels.lookup import bag_offsets
from recfx.kernels.lookup.per_sample_weights import (
    per_sample_weight_gradients_reference,
    per_sample_weight_gradients_triton,
)
from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from recfx.kernels.lookup.pooled_lookup_reference import pooled_lookup
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_reference, quantized_lookup_triton
from recfx.kernels.route.bucketize import bucketize_reference
from recfx.kernels.route.select_keys import select_keys_reference, select_keys_triton
from recfx.kernels.step.fused_step import fused_step_
from recfx.kernels.step.row_initialization import init_rows_of_tables_reference_, init_rows_triton_
from recfx.lowering.triton import npu
from recfx.optim.fused_step_op import fused_step_triton_, rules_in_triton, triton_module
from tests.ascend.npu_runtime.environment import is_simulated
from tests.ascend.npu_runtime.simulated_operators import KEY, over_the_same_memory

_library: list[torch.library.Library] = []


def _install() -> None:
    """Register the references for the device, once in a process."""
    if _library:
        return
    _library.append(torch.library.Library("recfx", "IMPL"))
    _library[0].impl("bucketize", bucketize_reference, KEY, allow_override=True)
    pooled_lookup_triton.register_kernel("npu", pooled_lookup)
    per_sample_weight_gradients_triton.register_kernel("npu", per_sample_weight_gradients_reference)
    quantized_lookup_triton.register_kernel("npu", quantized_lookup_reference)
    find_rows_triton.register_kernel("npu", _find_rows)
    fused_step_triton_.register_kernel("npu", _fused_step)
    init_rows_triton_.register_kernel("npu", init_rows_of_tables_reference_)
    select_keys_triton.register_kernel("npu", select_keys_reference)
    bag_offsets.bag_offsets_triton.register_kernel("npu", bag_offsets.kernel_reference)


def _find_rows(ids: torch.Tensor, table_ends: torch.Tensor, *indexes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    on_host = ReadIndexes(*(tensor.cpu() for tensor in indexes))
    rows, absent = find_rows_reference(ids.cpu(), table_ends.cpu(), on_host)
    return rows.to(ids.device), absent.to(ids.device)


def _fused_step(*arguments: Any) -> None:
    on_host = tree_map_only(torch.Tensor, over_the_same_memory, arguments)
    (rows, offsets, gradients), (weights, first, second, table_of_feature, is_stepped, module, _, numbers, *how) = (
        on_host[:3],
        on_host[3:],
    )
    weights = [
        weight if stepped else torch.empty(0, weight.shape[1])
        for weight, stepped in zip(weights, is_stepped, strict=True)
    ]
    (rule,) = [rule for rule in rules_in_triton() if triton_module(rule) == module]
    of_tables = numbers * len(weights)
    mean, scales, unpooled = (*how, False)[:3]
    of_rule = (rule.name, of_tables, mean, scales, None, unpooled)
    of_outputs = [gradients]
    if unpooled:
        pieces = gradients.split(offsets.diff().tolist())
        of_outputs = [
            piece[:, : weights[table].shape[1]] for piece, table in zip(pieces, table_of_feature, strict=True)
        ]
    fused_step_(rows, offsets, of_outputs, weights, first, second, table_of_feature, is_stepped, *of_rule)


@pytest.fixture(params=["npu", "npu[vendor]"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The form of target ``npu`` that serves, as if it had been measured to be the faster."""
    monkeypatch.setattr(npu, "measured", lambda *_: int(request.param != "npu"))
    return str(request.param)


@pytest.fixture
def simulated_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Target ``npu`` serves, as if triton-ascend were installed; ``monkeypatch.undo()`` takes it away again."""
    if is_simulated():
        _install()
    why_not, chip_name = launch.why_not, launch.chip_name
    monkeypatch.setattr(launch, "why_not", lambda device: "" if device.type == "npu" else why_not(device))
    monkeypatch.setattr(launch, "chip_name", lambda device: None if device.type == "npu" else chip_name(device))
    launch.is_possible.cache_clear()
    yield
    launch.is_possible.cache_clear()
