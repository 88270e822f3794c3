"""The tests for a real device run on a simulated NPU, kernels included, so that they do on the first chip.

A process of their own runs them as they would be run there. Triton's interpreter takes long, so it runs some forms of
kernels, and few examples; ``test_doctor.py`` has the operators' other shapes, and the training runs.
"""

from pathlib import Path

from tests.ascend.npu_runtime.conftest import Processes

OUTSIDE = True
FORMS = "bucket_counts-block_4 or weight_gradients-fp32-block_4"
CHOSEN = (f"test_kernels and ({FORMS})", "test_operators and not doctor and not insert", "test_models and not train_as")


def test_they_run(npu_processes: Processes, tmp_path: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/ascend/on_device", "-k", " or ".join(CHOSEN)]
    variables, printed = {"RECFX_KERNELS_ON": "npu:1", "RECFX_EXAMPLES": "1"}, tmp_path / "printed"
    printed.touch()
    status = npu_processes(False, True).run(options, variables, printed, 280)
    assert status == 0, printed.read_text()[-6000:]
    assert " passed" in printed.read_text()
    assert "skipped" not in printed.read_text()
