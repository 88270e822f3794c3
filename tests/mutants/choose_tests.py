"""Which tests judge a file: those beside it, the nearest first."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

BESIDE = {
    "passes": ["passes", "modules/test_means.py", "optim/test_settings_of_tables.py", "nodes", "ir"],
    "passes/insert_dist.py": ["passes", "sharding/test_types.py", "sharding/test_hashed.py", "sharding/test_mixed.py"],
    "passes/_collectives.py": ["passes", "sharding/test_wire.py", "sharding/test_explain.py"],
    "nodes": ["nodes", "modules", "passes", "lowering"],
    "nodes/input_dist.py": [
        "sharding/test_wire.py", "sharding/test_out_of_step.py", "sharding/test_corner_cases.py",
        "sharding/test_stock_pipeline.py",
    ],
    "nodes/output_dist.py": [
        "sharding/test_types.py", "sharding/test_gradient_division.py", "sharding/test_uneven_columns.py",
        "sharding/test_wire.py",
    ],
    "nodes/dist_groups.py": ["sharding/test_dist_groups.py", "sharding/test_replicas.py", "sharding/test_types.py"],
    "nodes/bucketize.py": ["nodes", "kernels/test_bucketize.py", "sharding/test_types.py"],
    "nodes/snapshot_indexes.py": ["nodes", "pipeline", "modules"],
    "nodes/training_checks.py": ["modules", "sharding/test_ddp.py", "planner/test_torchrec_entry.py"],
    "hashing": ["hashing", "modules", "kernels"],
    "sharding": ["sharding", "planner"],
    "checkpoint": ["checkpoint", "sharding/test_checkpoint.py"],
    "verification": ["verification", "conversion"],
    "lowering": ["lowering", "nodes/test_default_device.py", "kernels", "optim"],
    "optim": ["optim", "lowering", "sharding/test_optimizer_state.py", "sharding/test_optimizer_settings.py"],
    "pipeline": ["pipeline", "sharding/test_stock_pipeline.py"],
}  # fmt: skip
"""Folders and files below ``tests/`` for packages and files; other packages have the folder of their name."""


def package_of(path: Path) -> str:
    """``lowering`` for ``lowering/cpu.py``, ``passes`` for ``recfx/passes/lower.py``."""
    return path.parts[1] if path.parts[0] == "recfx" else path.parts[0]


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()


def tests_for(path: Path) -> list[str]:
    """Test files for one file of the product, both relative to the root: of the same stem, then those that name more of
    what is public in it, then the others of its package.
    """
    package = package_of(path)
    files: dict[Path, int] = {}
    places = BESIDE.get(f"{package}/{path.name}") or BESIDE.get(package, [package])
    for order, place in enumerate(places):
        where = Path("tests", place)
        for file in [where] if where.suffix else sorted(where.rglob("test_*.py")):
            files.setdefault(file, order)
    names = {path.stem.strip("_")} | {
        node.name.strip("_") for node in ast.parse(_text(path)).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    words = {file: set(re.findall(r"\w+", _text(file))) for file in files}

    def distance(file: Path) -> tuple[bool, int, int]:
        return file.stem.removeprefix("test_") != path.stem.strip("_"), -len(names & words[file]), files[file]

    return [str(file) for file in sorted(files, key=distance)]
