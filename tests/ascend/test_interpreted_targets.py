"""Lookups and models on target ``triton``, and the tests for a real device, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest

from tests.ascend.interpreter import WITHOUT_TORCHREC, run_interpreted
from tests.ascend.tools import ROOT

FILES = {
    "targets": ["tests/lowering/test_targets.py", "-k", "triton"],
    "steps": ["tests/lowering/test_step_once.py", "-k", "triton"],
    "operators": [
        f"tests/ascend/interpreted/test_{name}.py"
        for name in ("operators", "quantized_lookup", "bucketize", "find_rows")
    ],
    "batches": [
        f"tests/ascend/interpreted/test_{name}.py"
        for name in ("bag_offsets", "row_initialization", "select_keys", "step_order")
    ],
    "models": [f"tests/ascend/interpreted/test_{name}.py" for name in ("models", "find_rows_in_models")],
    "files": ["tests/exporter/test_kernels_in_files.py"],
    "interrupts": ["tests/ascend/interpreted/test_interrupts.py"],
}
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
FORMS = "fp32-block_4-weighted or find_rows or bucket_counts-block_4 or step_of_borders-adam-fp32"
BARE = f"{WITHOUT_TORCHREC}import pytest\nsys.exit(pytest.main())"


@pytest.mark.parametrize("name", FILES)
def test_as_every_other_target(name: str) -> None:
    assert " passed" in run_interpreted("-m", "pytest", *OPTIONS, *FILES[name])


def test_every_interpreted_file_is_run() -> None:
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "tests/ascend/interpreted").glob("test_*.py")}
    assert files <= {argument for arguments in FILES.values() for argument in arguments}


@pytest.mark.parametrize(
    ("command", "chosen"),
    [(["-m", "pytest"], f"operators or {FORMS}"), (["-c", BARE], f"hot_row or {FORMS}")],
    ids=["with TorchRec", "without TorchRec"],
)
def test_the_tests_for_a_device_run(command: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they do on the first GPU, too."""
    monkeypatch.setenv("RECFX_KERNELS_ON", "cpu")
    monkeypatch.setenv("RECFX_EXAMPLES", "15")
    printed = run_interpreted(*command, *OPTIONS, "tests/ascend/on_device", "-k", chosen)
    assert " passed" in printed
    assert "skipped" not in printed
