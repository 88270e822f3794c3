"""Which tests judge a file: those of its package and those that import it, the nearest first."""

import ast
import functools
import re
from pathlib import Path

BESIDE = {
    "passes": ["exporter"],
    "ir": ["passes", "inspect"],
    "runtime": ["collections", "passes", "sharding"],
    "hashing": ["collections", "sharding/test_state.py"],
    "sharding": ["planner"],
    "checkpoint": ["sharding"],
    "verification": ["conversion"],
    "lowering": ["optim"],
    "optim": ["lowering", "sharding/test_optimizer_state.py", "sharding/test_optimizer_settings.py"],
    "pipeline": ["sharding/test_stock_pipeline.py", "sharding/test_batch_steps.py"],
    "planner": ["sharding/test_plan.py", "sharding/test_explain.py", "inspect"],
    "pricing": ["planner", "inspect"],
    "kernels": ["hashing", "lowering", "optim"],
    "collections": ["runtime", "conversion"],
    "conversion": ["sharding/test_unconvert.py"],
    "replacement": ["conversion", "discovery"],
    "discovery": ["verification", "inspect", "conversion"],
    "models": ["verification", "discovery", "collections/test_replaced.py", "conversion", "inspect"],
    "versions": ["doctor"],
    "inspect": ["commandline", "sharding/test_monitor.py"],
    "drawing": ["commandline"],
    "printing": ["inspect", "drawing"],
}
"""Folders and files below ``tests/`` that judge a package, too."""
LAST = (
    "sharding", "checkpoint/test_round_trip.py", "checkpoint/test_crash.py", "conversion/test_convert.py",
    "exporter/test_serve_cpp.py", "exporter/test_serve_cpp_process.py", "runtime/test_batch_fuzz.py",
    "kernels/test_thread_safety.py",
)  # fmt: skip
"""They take long: they come after the others, unless they name what is public in the file."""
_ELSEWHERE = ("ascend", "bench", "tools")


def package_of(path: Path) -> str:
    """``lowering`` for ``lowering/cpu.py``, ``ir`` for ``recfx/ir/tables.py``, and ``sharding``, which has tests of its
    own, for ``recfx/collections/sharding/plan.py``.
    """
    if path.parts[0] != "recfx":
        return path.parts[0]
    inner = [folder for folder in path.parts[2:-1] if Path("tests", folder).is_dir()]
    return inner[-1] if inner else Path(path.parts[1]).stem


def tests_for(path: Path) -> list[str]:
    """Test files for one file of the product, both relative to the root.

    Kernels in Triton run in its interpreter alone. Of others, first the test of the same name, then those that name
    more of what is public in the file; of those, its own package comes first, and what takes long last.
    """
    if path.stem.endswith("_triton"):
        return ["tests/ascend/test_interpreted.py", "tests/ascend/test_interpreted_targets.py"]
    package = package_of(path)
    module = ".".join(path.with_suffix("").parts)
    module = module if path.parts[0] == "recfx" else f"recfx.{module}"
    names, places = _public_names(path), [package, *BESIDE.get(package, [])]
    order: dict[str, tuple[bool, bool, int, int]] = {}
    for file in _test_files():
        place = file.removeprefix("tests/")
        near = [number for number, beside in enumerate(places) if place.startswith(beside)]
        words = _words(file)
        if near or module in words:
            named = len(names & words)
            is_long = not named and place.startswith(LAST)
            has_its_name = Path(file).stem.removeprefix("test_") == path.stem.strip("_")
            order[file] = not has_its_name, is_long, -named, min(near, default=len(places))
    return sorted(order, key=lambda file: order[file]) or [file for file in _test_files() if file.count("/") == 1]


@functools.cache
def _test_files() -> list[str]:
    files = sorted(map(str, Path("tests").rglob("test_*.py")))
    return [file for file in files if not file.removeprefix("tests/").startswith(_ELSEWHERE)]


@functools.cache
def _words(file: str) -> set[str]:
    """The words of a test file, and the modules that it imports from."""
    text = Path(file).read_text()
    return set(re.findall(r"\w+", text)) | set(re.findall(r"^\s*(?:from|import) (recfx[\w.]*)", text, re.MULTILINE))


def _public_names(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text()).body
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name for name in (path.stem, *names) if not name.startswith("_")}
