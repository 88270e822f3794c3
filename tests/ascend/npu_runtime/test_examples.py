"""Every example that takes a device, with ``--device npu:0 --smoke``: it ends well, with the numbers of the CPU."""

import re
from pathlib import Path

import pytest

from tests.support.forked_script import run_script

MAY_FALL_BACK = True  # the standard collection, which verify runs as well, computes its offsets by FBGEMM

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SCRIPTS = sorted(
    path.stem
    for path in EXAMPLES.glob("*.py")
    if "__main__" in (text := path.read_text(encoding="utf-8")) and "--device" in text
    # Left out, with `torchrec_tour.py`, a notebook's source: for its checkpoint, torch_npu gathers objects through the
    # device, and the simulation's group cannot. The model of the other pads by operators that have no kernel there.
    if path.stem != "train_sequence"
)


def results(script: str, device: str) -> tuple[list[str], str]:
    """The lines with losses, qualities and differences, and everything that was printed."""
    finished = run_script(EXAMPLES / f"{script}.py", "--device", device, "--smoke")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr
    lines = re.findall(
        r".*\bloss\b.*\d|.*\bAUC\b.*\d|.*at most .* from the unsharded.*|.*largest difference \d.*|.*\(to within \d.*",
        finished.stdout,
    )
    return [line for line in lines if "samples/s" not in line], finished.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_switching_the_device_changes_nothing_else(script: str) -> None:
    on_cpu, _ = results(script, "cpu")
    on_npu, printed = results(script, "npu:0")
    assert on_npu == on_cpu
    assert len(on_npu) >= 2
    assert "npu" in printed or script == "train_dlrm"
    assert "nothing ran on an NPU" not in printed


@pytest.mark.parametrize("script", ["rec_sdk_quickstart", "train_dlrm"])
def test_a_device_that_is_not_there(script: str) -> None:
    finished = run_script(EXAMPLES / f"{script}.py", "--device", "npu:7", "--smoke")
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert "--device npu:7 cannot be used here" in finished.stderr
