"""The tests for a real device run: in Triton's interpreter here, so that they do on the first GPU, too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ascend.tools import ROOT, triton

FOLDER = "tests/ascend/on_device"
# As on a machine that has torch and Triton, but neither TorchRec nor FBGEMM.
BARE = "import sys\nsys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\nimport pytest\nsys.exit(pytest.main())"
FEW = "operators or fp32-block_4-weighted or find_rows or bucket_counts-block_4 or step_of_borders-adam-fp32"


@pytest.mark.parametrize("command", [["-m", "pytest"], ["-c", BARE]], ids=["with TorchRec", "without TorchRec"])
def test_they_run(command: list[str]) -> None:
    triton().require()
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "RECFX_KERNELS_ON": "cpu"}
    called = [sys.executable, *command, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", FOLDER, "-k", FEW]
    done = subprocess.run(called, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
