"""What the targets ``triton`` and ``npu`` decline, and that they say why. No kernel is launched here."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import recfx
from recfx.hashing import HashConfig
from recfx.ir import TableSpec
from recfx.ir.context import Served
from recfx.kernels.build import launch, tiling
from recfx.lowering.registry import BACKENDS, LookupSpec, PlannedTargets, TargetsHere, select_backend
from recfx.lowering.triton import npu
from recfx.lowering.triton import target as triton_target
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules.adam import ADAM
from recfx.optim.rules.lamb import LAMB
from recfx.optim.rules.sgd import SGD
from tests.builders.collections import one_table
from tests.support.refusals import refused

TARGET = {backend.name: backend for backend in BACKENDS}


def spec(dims: tuple[int, ...] = (4, 8), dtype: torch.dtype = torch.float32, **changes: Any) -> LookupSpec:
    adopted = HashConfig().resolve(10, adopt=True)
    tables = tuple(
        TableSpec(f"t{number}", (f"f{number}",), (f"f{number}",), 10, dim, "SUM", adopted, 0.0, 0.0)
        for number, dim in enumerate(dims)
    )
    weights: list[torch.Tensor] = [nn.Parameter(torch.zeros(10, dim, dtype=dtype)) for dim in dims]
    return replace(LookupSpec(tables, "SUM", False, weights, [None] * len(dims)), **changes)


def with_second(weight: torch.Tensor) -> LookupSpec:
    """The lookup with another second table."""
    return spec(weights=[torch.zeros(10, 4), weight])


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton were there, as an interpreter."""
    stand_in_for_triton(monkeypatch, zeros=object())


class JITFunction:
    """Stands for Triton's class of functions that are compiled, and not interpreted."""


def stand_in_for_triton(monkeypatch: pytest.MonkeyPatch, zeros: object) -> None:
    """With ``TRITON_INTERPRET=1``, and ``zeros`` as ``triton.language.zeros``."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "triton" else find_spec(name))
    module: Any = ModuleType("triton")
    module.JITFunction, module.language = JITFunction, SimpleNamespace(zeros=zeros)
    backends: Any = ModuleType("triton.backends")
    backends.backends = {"nvidia": object()}
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setitem(sys.modules, "triton.backends", backends)


def declined(asked: LookupSpec) -> tuple[str, str]:
    decline = TARGET["triton"].decline(asked)
    assert decline is not None
    assert (decline.by, decline.path) == ("triton", "")
    return decline.code, decline.message


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (lambda: spec(dtype=torch.float64), "dtype", "not of torch.float64"),
        (lambda: with_second(torch.zeros(10, 8).half()), "dtype", "not of torch.float16, torch.float32"),
        (lambda: replace(spec(), weights=[torch.zeros(4, 10).t(), torch.zeros(10, 8)]), "not_contiguous", "rows"),
        (lambda: spec((4, 1025)), "too_many_columns", "up to 1024 columns, table 't1' has 1025"),
        (lambda: spec(optimizers=[FusedOptimizer(LAMB, {"lr": 0.1})] * 2), "optimizer", "no step of lamb in Triton"),
        (lambda: with_second(torch.zeros(10, 8, device="meta")), "device", "cpu/meta"),
    ],
)
def test_what_no_kernel_serves(asked: Callable[[], LookupSpec], code: str, said: str) -> None:
    assert TARGET["triton"].decline(spec()) is None
    reason, message = declined(asked())
    assert reason == code
    assert said in message


def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_triton(monkeypatch, zeros=object())
    monkeypatch.setitem(sys.modules, "triton.backends", None)


def interpreter_was_asked_for_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_triton(monkeypatch, zeros=JITFunction())


def only_the_interpreter_is_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(
    "without",
    [
        not_installed, cannot_be_imported, interpreter_was_asked_for_too_late, only_the_interpreter_is_for_the_cpu,
    ],
)  # fmt: skip
def test_without_triton(without: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    code, _ = declined(spec())
    assert code == "no_triton"


@pytest.mark.parametrize("backend", ["triton", "npu"])
def test_a_target_that_was_named_is_an_error_where_it_cannot_serve(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = nn.Sequential(one_table())
    with refused("backend_unusable", "0"):
        recfx.convert(model, backend=backend)
    assert type(model[0]).__name__ == "EmbeddingBagCollection"


def test_automatic_choice_passes_over_targets_for_other_devices() -> None:
    """The report of a model on the CPU does not speak of GPUs and NPUs."""
    choice = select_backend(spec(dtype=torch.float64), "auto", "")
    assert choice.backend == "reference"
    assert {decline.by for decline in choice.declined} == {"cpu", "fbgemm"}
    assert [target.name for target in BACKENDS if target.device_types] == ["triton", "npu", "npu[vendor]"]


class Npu(NamedTuple):
    """Stands for a ``torch.device`` that torch does not know without torch_npu."""

    type: str = "npu"


def on_npu(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[LookupSpec], Any]:
    """What ``npu`` declines of tables on an NPU called ``name``, with triton-ascend there, where it was the faster."""
    monkeypatch.setattr(launch, "why_not", lambda device: "")
    monkeypatch.setattr(npu, "measured", lambda *arguments: 0)
    module = SimpleNamespace(get_device_name=lambda device: name)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def decline(asked: LookupSpec) -> Any:
        weights = [
            SimpleNamespace(
                device=Npu(),
                dtype=weight.dtype,
                shape=weight.shape,
                requires_grad=True,
                is_contiguous=lambda: True,
                is_neg=lambda: False,
            )
            for weight in asked.weights
        ]
        return TARGET["npu"].decline(replace(asked, weights=weights))  # type: ignore[arg-type]

    return decline


def test_a_chip_without_a_tiling_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_npu("Ascend910B3", monkeypatch)(spec()) is None
    decline = on_npu("Ascend999", monkeypatch)(spec())
    assert decline.code == "no_tiling_table"
    assert "'Ascend999'" in decline.message
    assert "Ascend910B3" in decline.message


def test_a_kernel_that_does_not_fit_into_the_unified_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    decline = on_npu("Ascend910B3", monkeypatch)
    assert decline(spec((1024,))) is None
    small = replace(tiling.ASCEND_910B, ub_bytes=40_000)
    monkeypatch.setattr(tiling, "chip_named", lambda name: small)
    declined_one = decline(spec((1024,), optimizers=[FusedOptimizer(ADAM, {"lr": 0.1})]))
    assert declined_one.code == "unified_buffer"
    assert "bytes of the unified buffer" in declined_one.message
    assert decline(spec((64,))) is None


def test_of_a_lookup_without_optimizer_the_step_that_gives_gradients_has_to_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is SGD's; with another rule, that one's alone."""
    decline = on_npu("Ascend910B3", monkeypatch)
    of_lookups = {kernel: dict.fromkeys(sizes, tiling.Need(0, 1)) for kernel, sizes in tiling.NEEDS.items()}
    monkeypatch.setattr(tiling, "NEEDS", of_lookups)  # the steps need most
    of_sgd = tiling.ub_bytes("recfx_fused_step", 1024, 4, SGD.needs)
    of_adam = spec((1024,), optimizers=[FusedOptimizer(ADAM, {"lr": 0.1})])
    for ub_bytes, asked, fits in (
        (of_sgd, spec((1024,)), True),
        (of_sgd, of_adam, False),
        (of_sgd - 1, spec((1024,)), False),
    ):
        small = replace(tiling.ASCEND_910B, ub_bytes=ub_bytes)
        monkeypatch.setattr(tiling, "chip_named", lambda name, small=small: small)
        answer = decline(asked)
        assert answer is None if fits else answer.code == "unified_buffer"


def test_a_rule_whose_step_was_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = replace(ADAM, needs=None)
    monkeypatch.setattr(triton_target, "rule_named", {"adam": rule}.get)
    decline = on_npu("Ascend910B3", monkeypatch)
    declined_one = decline(spec(optimizers=[FusedOptimizer(rule, {"lr": 0.1})] * 2))
    assert declined_one.code == "unified_buffer"
    assert "a step of adam takes was never measured" in declined_one.message


def test_rows_are_found_by_kernels_where_they_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU in Triton's interpreter alone."""
    for device, label in (("cuda", "triton[gpu]"), ("cpu", "triton")):
        monkeypatch.setattr(launch, "why_not", lambda device: "")
        assert TargetsHere().find_rows(device) == Served(label, ())
        monkeypatch.setattr(launch, "why_not", lambda device: "Triton is not installed.")
        choice = TargetsHere().find_rows(device)
        assert (choice.backend, [(decline.by, decline.code) for decline in choice.declined]) == (
            "reference",
            [("triton", "no_triton")],
        )
        assert PlannedTargets().find_rows(device).backend == label
    assert PlannedTargets().find_rows("npu").backend == "npu"
    assert PlannedTargets().find_rows("meta").backend == "reference"


def test_indexes_are_on_the_cpu() -> None:
    assert TargetsHere().index_operators("cpu") == PlannedTargets().index_operators("cpu") == "cpu"
    assert TargetsHere().index_operators("meta") == ""
