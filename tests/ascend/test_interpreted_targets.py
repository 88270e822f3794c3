"""Lookups and models on target ``triton``, and the tests for a real device, in Triton's interpreter on the CPU."""

from collections.abc import Callable, Iterator

import pytest

from tests.ascend import tools
from tests.ascend.interpreter import LONGEST, WITHOUT_TORCHREC, interpreting, run_interpreted
from tests.ascend.npu_runtime.forked import Forking
from tests.ascend.tools import ROOT

FILES = {
    "targets": ["tests/lowering/test_targets.py", "-k", "triton"],
    "steps": ["tests/lowering/test_step_once.py", "-k", "triton"],
    "operators": [
        f"tests/ascend/interpreted/test_{name}.py" for name in ("operators", "quantized_lookup", "bucketize")
    ],
    "batches": [f"tests/ascend/interpreted/test_{name}.py" for name in ("bag_offsets", "step_order")],
    "models": [f"tests/ascend/interpreted/test_{name}.py" for name in ("models", "find_rows_in_models")],
    "files": ["tests/exporter/test_kernels_in_files.py"],
}
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
FORMS = "fp32-block_4-weighted or find_rows or bucket_counts-block_4 or step_of_borders-adam-fp32"
BARE = f"{WITHOUT_TORCHREC}import pytest\nsys.exit(pytest.main())"


Run = Callable[..., str]
"""pytest with some options, and further variables, in a process with kernels that are interpreted; what it prints."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """In processes forked from one that has imported torch and TorchRec."""
    tools.triton().require()
    forking, printed = Forking(interpreting()), tmp_path_factory.mktemp("interpreted") / "printed"

    def run_forked(*options: str, **environment: str) -> str:
        printed.write_text("")
        status = forking.run([*OPTIONS, *options], environment, printed, LONGEST)
        assert status == 0, printed.read_text()[-7000:]
        return printed.read_text()

    yield run_forked
    forking.stop()


def run_bare(*options: str, **environment: str) -> str:
    """In a process without TorchRec."""
    return run_interpreted("-c", BARE, *OPTIONS, *options, **environment)


@pytest.mark.parametrize("name", FILES)
def test_as_every_other_target(name: str, run: Run) -> None:
    assert " passed" in run(*FILES[name])


def test_every_interpreted_file_is_run() -> None:
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "tests/ascend/interpreted").glob("test_*.py")}
    assert files <= {argument for arguments in FILES.values() for argument in arguments}


@pytest.mark.parametrize(
    ("has_torchrec", "chosen"),
    [(True, f"operators or {FORMS}"), (False, f"hot_row or {FORMS}")],
    ids=["with TorchRec", "without TorchRec"],
)
def test_the_tests_for_a_device_run(has_torchrec: bool, chosen: str, run: Run) -> None:
    """So that they do on the first GPU, too."""
    run_there = run if has_torchrec else run_bare
    printed = run_there("tests/ascend/on_device", "-k", chosen, RECFX_KERNELS_ON="cpu", RECFX_EXAMPLES="15")
    assert " passed" in printed
    assert "skipped" not in printed
