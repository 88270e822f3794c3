"""The tests for a real device run on a simulated NPU, kernels included, so that they do on the first chip.

A process of their own runs them as they would be run there. Triton's interpreter takes long, so it runs some forms of
kernels, and few examples; ``test_doctor.py`` has the operators' other shapes, and the training runs.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.ascend.tools import ROOT

INTERPRETED = True
FORMS = "bucket_counts-block_4 or weight_gradients-fp32-block_4"
CHOSEN = (f"test_kernels and ({FORMS})", "test_operators and not doctor and not insert", "test_models and not train_as")


def test_they_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/ascend/on_device",
         "-k", " or ".join(CHOSEN)],
        env={**os.environ, "RECFX_KERNELS_ON": "npu:1", "RECFX_EXAMPLES": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
