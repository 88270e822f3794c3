"""What was measured to be best: it is kept, read, and used by launches; a file that cannot be used is as none."""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recfx.kernels.build import launch, tuned
from recfx.kernels.build.tiling import ASCEND_910B
from recfx.kernels.build.tuned import PROGRAMS_PER_CORE, ROWS_IN_FLIGHT, WARPS, keep, trying

LOOKUP = "recfx_pooled_lookup"
CHIP = "Ascend910B3"


def programs(number: int) -> tuned.Choices:
    return {PROGRAMS_PER_CORE: {LOOKUP: number}}


def programs_per_core(device_name: str, kernel: str = LOOKUP) -> int | None:
    return tuned.number(device_name, PROGRAMS_PER_CORE, kernel)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RECFX_BUILD_DIR", str(tmp_path / "cache"))
    tuned._kept.cache_clear()
    yield
    tuned._kept.cache_clear()


def test_what_is_kept_is_read(caplog: pytest.LogCaptureFixture) -> None:
    assert programs_per_core(CHIP) is None
    assert caplog.text == ""
    keep(CHIP, {**programs(4), ROWS_IN_FLIGHT: {LOOKUP: 16}})
    assert programs_per_core("H100") is None
    written = tuned.path().read_text()
    tuned.path().write_text(written.replace(CHIP, "A100"))  # by another process
    keep(CHIP, {**programs(4), ROWS_IN_FLIGHT: {LOOKUP: 16}})
    assert keep("H100", programs(16)) == tuned.path()
    tuned._kept.cache_clear()
    assert [programs_per_core(name) for name in (CHIP, "H100", "A100", "V100")] == [4, 16, 4, None]
    assert [tuned.number(name, ROWS_IN_FLIGHT, LOOKUP) for name in (CHIP, "H100")] == [16, None]
    assert programs_per_core(CHIP, "recfx_quantized_lookup") is None
    assert tuned.path().parent.stat().st_mode & 0o077 == 0


def test_a_number_that_is_tried_goes_before_what_was_kept() -> None:
    keep(CHIP, programs(4))
    with trying(PROGRAMS_PER_CORE, LOOKUP, 2), trying(ROWS_IN_FLIGHT, LOOKUP, 8):
        assert (programs_per_core(CHIP), tuned.number(CHIP, ROWS_IN_FLIGHT, LOOKUP)) == (2, 8)
    assert (programs_per_core(CHIP), tuned.number(CHIP, ROWS_IN_FLIGHT, LOOKUP)) == (4, None)


def _text_of(setting: str, kernel: str, number: object) -> str:
    return json.dumps({"version": 2, "devices": {"x": {setting: {kernel: number}}}})


@pytest.mark.parametrize(
    "text",
    [
        '{"version": 2, "devi',
        "[]",
        '{"version": 2}',
        *(_text_of(PROGRAMS_PER_CORE, *choice) for choice in [(LOOKUP, 0), (LOOKUP, True), ("recfx_fused_step", 2)]),
        _text_of(ROWS_IN_FLIGHT, LOOKUP, 12),
    ],
)
def test_a_file_that_is_none_of_ours(text: str, caplog: pytest.LogCaptureFixture) -> None:
    tuned.path().parent.mkdir(mode=0o700)
    tuned.path().write_text(text)
    tuned.path().chmod(0o600)
    with caplog.at_level(logging.WARNING, "recfx"):
        assert [programs_per_core("x") for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "is not used" in caplog.text


def test_launches_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = SimpleNamespace(type="npu")
    monkeypatch.setattr(launch, "chip_of", lambda device: ASCEND_910B)
    monkeypatch.setattr(launch, "chip_name", lambda device: ASCEND_910B.name)
    keep(CHIP, programs(2))
    assert launch.programs(device, 10**6, LOOKUP) == 80
    assert launch.programs(device, 50, LOOKUP) == 50
    assert launch.programs(device, 10**6) == 40
    assert launch.programs(device, 10**6, "recfx_quantized_lookup") == 40
    assert launch.lookup_rows(device, 64, LOOKUP) == 32
    keep(CHIP, {ROWS_IN_FLIGHT: {LOOKUP: 16}})
    assert [launch.lookup_rows(device, block, LOOKUP) for block in (64, 512, 1024)] == [16, 16, 8]


def test_launches_on_a_gpu_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", multi_processor_count=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device: Any = SimpleNamespace(type="cuda")
    weights, on_gpu = "recfx_quantized_lookup", f"{LOOKUP}_on_gpu"
    assert [launch.programs(device, 10**6, kernel) for kernel in (weights, "recfx_fused_step")] == [640, 1280]
    assert [launch.warps(device, on_gpu, block) for block in (16, 128, 256, 1024)] == [1, 1, 2, 4]
    keep("H100", {PROGRAMS_PER_CORE: {weights: 8}, WARPS: {on_gpu: 8}})
    kernels = on_gpu, "recfx_fused_step", "recfx_select_keys"
    assert [launch.warps(device, kernel, 16) for kernel in kernels] == [8, 1, 4]
    assert [launch.programs(device, 10**6, kernel) for kernel in (weights, "recfx_select_keys")] == [80, 160]

    class Kernel:
        __name__ = on_gpu

        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *arguments, **constants: said.append(constants["num_warps"])

    said: list[int] = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(device=contextlib.nullcontext))
    launch.launch(Kernel(), 1, SimpleNamespace(device=device), BLOCK_D=256)  # type: ignore[arg-type]
    assert said == [8]
