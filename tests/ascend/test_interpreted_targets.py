"""Lookups and whole models on target ``triton``, whose kernels Triton's interpreter runs on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ascend.tools import ROOT, triton

FILES = {
    "targets": ["tests/lowering/test_targets.py", "-k", "triton"],
    "steps": ["tests/lowering/test_step_once.py", "-k", "triton"],
    "operators": [
        f"tests/ascend/interpreted/test_{name}.py"
        for name in ("operators", "quantized_lookup", "bucketize", "find_rows")
    ],
    "models": [f"tests/ascend/interpreted/test_{name}.py" for name in ("models", "find_rows_in_models")],
    "files": ["tests/exporter/test_kernels_in_files.py"],
    "interrupts": ["tests/ascend/interpreted/test_interrupts.py"],
}


@pytest.mark.parametrize("name", FILES)
def test_as_every_other_target(name: str) -> None:
    triton().require()
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *FILES[name]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
