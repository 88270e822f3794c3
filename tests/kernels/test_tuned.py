"""What was measured to be best: it is kept, read, and used by launches; a file that cannot be used is as none."""

from __future__ import annotations

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
from recfx.kernels.build.tuned import TunedFileError, keep, parse, programs_per_core, trying

LOOKUP = "recfx_pooled_lookup"
CHIP = "Ascend910B3"


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RECFX_BUILD_DIR", str(tmp_path / "cache"))
    tuned._kept.cache_clear()
    yield
    tuned._kept.cache_clear()


def test_nothing_was_kept(caplog: pytest.LogCaptureFixture) -> None:
    assert programs_per_core(CHIP, LOOKUP, 1) == 1
    assert caplog.text == ""


def test_what_is_kept_is_read() -> None:
    keep(CHIP, {LOOKUP: 4})
    assert keep("H100", {LOOKUP: 16}) == tuned.path()
    tuned._kept.cache_clear()
    assert [programs_per_core(name, LOOKUP, 1) for name in (CHIP, "H100", "A100")] == [4, 16, 1]
    assert programs_per_core(CHIP, "recfx_quantized_lookup", 1) == 1
    assert tuned.path().parent.stat().st_mode & 0o077 == 0


def test_a_number_that_is_tried_goes_before_what_was_kept() -> None:
    keep(CHIP, {LOOKUP: 4})
    with trying(LOOKUP, 2):
        assert programs_per_core(CHIP, LOOKUP, 1) == 2
    assert programs_per_core(CHIP, LOOKUP, 1) == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"version": 1, "programs', "no JSON"),
        ("[]", "not of version 1"),
        ('{"version": 2, "programs_per_core": {}}', "not of version 1"),
        ('{"version": 1}', "names no devices"),
        ('{"version": 1, "programs_per_core": {"x": 3}}', "names no devices"),
        *(
            (json.dumps({"version": 1, "programs_per_core": {"x": {kernel: number}}}), f"cannot be {number!r}")
            for kernel, number in [(LOOKUP, 0), (LOOKUP, 65), (LOOKUP, 2.0), (LOOKUP, True), ("recfx_fused_step", 2)]
        ),
    ],
)
def test_a_file_that_is_none_of_ours(text: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TunedFileError, match=told):
        parse(text)
    tuned.path().parent.mkdir(mode=0o700)
    tuned.path().write_text(text)
    tuned.path().chmod(0o600)
    with caplog.at_level(logging.WARNING, "recfx"):
        assert [programs_per_core("x", LOOKUP, 7) for _ in range(3)] == [7] * 3
    assert len(caplog.records) == 1
    assert "is not used" in caplog.text


def test_a_file_that_others_may_write(caplog: pytest.LogCaptureFixture) -> None:
    keep(CHIP, {LOOKUP: 4}).chmod(0o666)
    tuned._kept.cache_clear()
    with caplog.at_level(logging.WARNING, "recfx"):
        assert programs_per_core(CHIP, LOOKUP, 1) == 1
    assert "can be written to by others" in caplog.text


def test_launches_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = SimpleNamespace(type="npu")
    monkeypatch.setattr(launch, "chip_of", lambda device: ASCEND_910B)
    keep(CHIP, {LOOKUP: 2})
    assert launch.programs(device, 10**6, LOOKUP) == 80
    assert launch.programs(device, 50, LOOKUP) == 50
    assert launch.programs(device, 10**6) == 40
    assert launch.programs(device, 10**6, "recfx_quantized_lookup") == 40


def test_launches_on_a_gpu_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", multi_processor_count=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device: Any = SimpleNamespace(type="cuda")
    assert launch.programs(device, 10**6, LOOKUP) == 10 * launch.PROGRAMS_PER_MULTIPROCESSOR
    keep("H100", {LOOKUP: 8})
    assert launch.programs(device, 10**6, LOOKUP) == 80
    assert launch.programs(device, 10**6) == 10 * launch.PROGRAMS_PER_MULTIPROCESSOR
