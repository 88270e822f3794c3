"""Without TorchRec there are no models; on a simulated NPU, Triton's interpreter runs the kernels of these tests."""

import os

import pytest

from tests.support import without_torchrec

collect_ignore = ["test_models.py"] if without_torchrec.prepare() else []

if "RECFX_SIMULATED_NPUS" in os.environ:
    from tests.ascend.npu_runtime.interpreted_kernels import interpreted_kernels as interpreted_kernels

    @pytest.fixture(autouse=True)
    def _interpreted(interpreted_kernels: None) -> None:
        pass
