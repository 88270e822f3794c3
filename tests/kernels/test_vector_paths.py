"""Each path of the kernels that this machine has gives the same bits, and RECFX_CPU_CAPABILITY chooses it."""

from pathlib import Path

import pytest
import torch

from recfx.kernels.build import library
from tests.kernels import repeat_calls
from tests.kernels.recorded_calls import record
from tests.support.forked_script import run_script

SCRIPT = Path(repeat_calls.__file__)
OPERATORS = {
    "bag_offsets", "bucketize", "different_ids", "erase", "find", "find_and_pool", "find_or_insert",
    "find_tables", "fused_step_", "init_rows_", "mark_initialized",
    "per_sample_weight_gradients", "pool_again_", "pooled_lookup", "rebuild", "served_lookup", "slot_tables_",
    "sum_rows",
}  # fmt: skip


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calls") / "calls.pt"
    record(path, 15)
    assert {name for name, _, _ in torch.load(path, weights_only=True)} >= OPERATORS
    return path


@pytest.mark.parametrize("path", ["generic", "avx2", "avx512", "neon"])
def test_each_path_gives_the_same_bits(path: str, calls: Path) -> None:
    if path not in torch.ops.recfx.cpu_capabilities():
        pytest.skip(f"this machine has no path {path}")
    environment = {"RECFX_CPU_CAPABILITY": path}
    finished = run_script(SCRIPT, str(library.loaded_path()), str(calls), environment=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.startswith(f"path {path}: ")


@pytest.mark.parametrize("name", ["mmx", "AVX2", "avx512 "])
def test_a_path_that_is_not_there_is_refused(name: str, calls: Path) -> None:
    finished = run_script(SCRIPT, str(library.loaded_path()), str(calls), environment={"RECFX_CPU_CAPABILITY": name})
    assert finished.returncode != 0
    assert f"RECFX_CPU_CAPABILITY is {name}, which kernels on this machine cannot use" in finished.stderr
    assert "choose one of generic" in finished.stderr
