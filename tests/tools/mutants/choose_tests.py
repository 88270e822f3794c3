"""Which tests judge a file: those beside it, the nearest first."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.tools.mutants.compile_once import included_by
from tests.tools.mutants.interpreted import tests_that_interpret

_INTERPRETED = ["ascend/test_interpreted.py", "ascend/test_interpreted_targets.py"]
_ON_NPU = "ascend/npu_runtime"
BESIDE = {
    "passes": ["passes", "collections/test_kinds_of_tables.py", "optim/test_settings_of_tables.py", "ir"],
    **{
        f"recfx/passes/{stem}.py": ["passes", "exporter/test_export.py", "exporter/test_every_format.py"]
        for stem in ("freeze_indexes", "quantize_rows", "fuse_served_lookup")
    },
    "recfx/passes/insert_dist.py": ["passes", "sharding/test_types.py"],
    "recfx/ir/node_values.py": ["passes", "sharding/test_wire.py", "sharding/test_explain.py"],
    "recfx/ir/ways_back.py": [
        "passes", "sharding/test_plan.py", "sharding/test_wire.py",
        "sharding/test_quantized.py", "sharding/test_types.py",
    ],
    "recfx/runtime/wire.py": ["sharding/test_quantized.py", "planner/test_torchrec_entry.py"],
    "runtime": ["runtime", "collections", "passes", "lowering"],
    "recfx/runtime/input_dist.py": [
        "sharding/test_wire.py", "sharding/test_out_of_step.py", "sharding/test_corner_cases.py",
        "sharding/test_stock_pipeline.py", "sharding/test_types.py", "runtime", "kernels/test_bucketize.py",
    ],
    "recfx/runtime/output_dist.py": [
        "sharding/test_types.py", "sharding/test_quantized.py", "sharding/test_uneven_columns.py",
        "sharding/test_wire.py", "sharding/test_corner_cases.py",
    ],
    "recfx/runtime/dist_groups.py": [
        "sharding/test_dist_groups.py", "sharding/test_shard_trained.py", "sharding/test_types.py",
    ],
    "recfx/runtime/find_ids.py": ["runtime", "pipeline", "collections"],
    "recfx/runtime/transfers.py": [_ON_NPU, "runtime"],
    **{
        f"recfx/runtime/{stem}.py": [f"{_ON_NPU}/test_find_rows.py", f"{_ON_NPU}/test_overlap.py", "runtime", "passes"]
        for stem in ("find_rows", "index_copies")
    },
    "recfx/runtime/training_checks.py": ["collections", "sharding/test_ddp.py", "planner/test_torchrec_entry.py"],
    "hashing": ["hashing", "collections", "kernels"],
    **{f"recfx/hashing/{stem}.py": ["hashing", "sharding/test_state.py"] for stem in ("slices", "row_move")},
    "sharding": ["sharding", "planner"],
    "checkpoint": [
        "checkpoint", "sharding/test_checkpoint.py", "sharding/test_checkpoint_optimizers.py",
        "sharding/test_resume_under_another_plan.py",
    ],
    "verification": ["verification", "conversion"],
    "lowering": ["lowering", "runtime/test_default_device.py", "kernels", "optim"],
    "lowering/step/profiler_ranges.py": ["runtime/test_profile.py", "lowering"],
    **{
        path: [
            "lowering/test_triton_limits.py", "ascend/test_interpreted_targets.py", "lowering/test_registry.py",
            f"{_ON_NPU}/test_target.py",
        ]
        for path in ("lowering/triton/lookup.py", "lowering/triton/target.py", "recfx/optim/fused_step_op.py")
    },
    "kernels/build/launch.py": ["lowering/test_triton_limits.py", "kernels/test_tiling.py", *_INTERPRETED],
    "optim": [
        "optim", "kernels/test_fused_step.py", "lowering", "sharding/test_optimizer_state.py",
        "sharding/test_optimizer_settings.py",
    ],
    "pipeline": ["pipeline", "sharding/test_stock_pipeline.py", "sharding/test_batch_steps.py"],
    "planner": ["planner", "sharding/test_plan.py", "sharding/test_explain.py", "inspect"],
    "pricing": ["pricing", "planner", "inspect", "drawing/test_costs.py"],
    "kernels": ["kernels", "hashing", "lowering", "optim"],
    "csrc": ["kernels", "hashing", "lowering", "optim", "collections"],
    "serving": ["exporter", "kernels/test_served_lookup.py", "kernels/test_quantized_lookup.py"],
    "ir": ["ir", "passes", "inspect"],
    "collections": ["collections", "runtime", "conversion"],
    "conversion": ["conversion", "sharding/test_unconvert.py"],
    "replacement": ["conversion", "collections/test_fit_table.py", "discovery"],
    "discovery": ["discovery", "verification", "inspect", "conversion"],
    "inspect": ["inspect", "commandline", "sharding/test_monitor.py"],
    "drawing": ["drawing", "commandline"],
    "printing": ["inspect", "drawing"],
    "argument_types": ["conversion/test_arguments.py"],
    "errors": ["test_diagnostics.py", "checkpoint/test_refusals.py", "conversion/test_refusals.py"],
    "versions": ["test_versions.py", "doctor/test_installed_set.py", "test_packaging.py", "planner/test_plan.py"],
    "__init__": ["test_structure.py", "test_packaging.py", "test_cold_start.py"],
    "api": ["test_structure.py", "test_cold_start.py"],
    "__main__": ["commandline"],
}  # fmt: skip
"""Folders and files below ``tests/`` for packages and files; other packages have the folder of their name."""

_SHARDING = {
    "collection": ["test_copies", "test_state", "test_explain", "test_ddp", "test_plan", "test_optimizer_settings"],
    "gather": ["test_unconvert", "test_uneven_columns", "test_dist_groups"],
    "load_state": ["test_state", "test_refusals", "test_dist_groups"],
    "optimizer": ["test_optimizer_state", "test_state"],
    "optimizer_settings": ["test_optimizer_settings", "test_shard_trained"],
    "pipeline_stages": ["test_batch_steps", "test_types", "test_stock_pipeline"],
    "plan": ["test_plan"],
    "ranks_agree": ["test_ranks_agree"],
    "shard": ["test_plan", "test_optimizer_settings", "test_copies"],
    "sharded_tables": ["test_state", "test_explain", "test_shard_trained", "test_optimizer_state", "test_step_once"],
    "state": ["test_pieces", "test_state", "test_dist_groups"],
    "whole_plan": ["test_plan"],
    **{f"types/{stem}": ["test_plan", "test_types"] for stem in ("by_columns", "by_rows", "data_parallel", "_planned")},
}
_SHARDING_ELSEWHERE = {
    "pipeline_stages": "pipeline/test_train_pipeline.py",
    "sharded_tables": f"{_ON_NPU}/test_sharded.py",
}
_LOADING = ["collections/test_new_ids", "collections/test_state", "sharding/test_state"]
_HASHING = {
    "arguments": ["hashing/test_index", "hashing/test_slices", "hashing/test_meta"],
    "config": ["hashing/test_config"],
    "identity": ["hashing/test_state", "hashing/test_state_of_policies"],
    "index": ["hashing/test_holds", "hashing/test_index", "hashing/test_meta", "hashing/test_state_of_policies"],
    "row_move": ["hashing/test_row_move", "hashing/test_holds", "hashing/test_slices"],
    "slices": ["hashing/test_holds", "hashing/test_slices"],
    "state": ["hashing/test_holds", "hashing/test_state", "hashing/test_state_of_policies", "hashing/test_index"],
    "storage": ["hashing/test_holds", "hashing/test_state", "hashing/test_index", "hashing/test_threads", *_LOADING],
}
_CHECKPOINT = {
    **{name: ["sharding/test_checkpoint"] for name in ("tables", "table_names", "peers")},
    "storage": ["checkpoint/test_storage", "sharding/test_checkpoint"],
    "load": ["sharding/test_checkpoint_optimizers", "checkpoint/test_refusals"],
    "model_plan": ["checkpoint/test_model_plan", "conversion/test_tied_tables"],
    "ordinary": ["checkpoint/test_ordinary", "checkpoint/test_saved_optimizers", "sharding/test_checkpoint_optimizers"],
    "save": [f"checkpoint/test_{name}" for name in ("crash", "directory", "refusals")],
}
_EXPORTER = {
    "sharded_export": ["exporter/test_sharded"],
    "served_collection": ["exporter/test_torchrec_flow"],
    "torch_entry": ["exporter/test_scripting"],
}
_STEMS = {
    "recfx/collections/sharding": {stem: [f"sharding/{name}" for name in names] for stem, names in _SHARDING.items()},
    "recfx/collections": {"copy_modules": ["collections/test_replaced"]},
    "recfx/hashing": _HASHING,
    "recfx/checkpoint": _CHECKPOINT,
    "recfx/exporter": _EXPORTER,
}
FIRST = {
    f"{folder}/{stem}.py": [f"{name}.py" for name in names]
    for folder, stems in _STEMS.items()
    for stem, names in stems.items()
}
"""Files below ``tests/`` that come before all others: to run all that need real ranks takes minutes."""
for _stem, _name in _SHARDING_ELSEWHERE.items():
    FIRST[f"recfx/collections/sharding/{_stem}.py"].append(_name)
LAST = (Path("tests/checkpoint/test_round_trip.py"), Path("tests/checkpoint/test_crash.py"))
"""They take long, and others beside them notice nearly as much."""

LONG = {
    "runtime/test_batch_fuzz.py", "runtime/test_base.py",
    "collections/test_batches.py", "collections/test_new_ids.py", "kernels/test_thread_safety.py",
    *(f"exporter/test_{name}.py" for name in ("auc", "memory", "pt2", "serve_cpp", "serve_cpp_process", "sharded")),
    "exporter/test_zoo.py", *_INTERPRETED,
}  # fmt: skip
"""They take long, too: they come after the others, but for the file of their own name."""


CPP = {
    "bucketize": ["sharding/test_types.py"],
    "hash_index": ["kernels/test_index_operators.py", "kernels/test_index_tables.py", "hashing"],
    "served_lookup": ["kernels/test_quantized_lookup.py", "exporter/test_zoo.py", "exporter/test_every_format.py"],
    "slot_tables": ["kernels/test_slot_table.py", "kernels/test_slot_groups.py", "hashing"],
    "fused_step": ["optim"],
}
"""Files and folders below ``tests/`` for what is compiled into one C++ source, after the test of its own name."""


def package_of(path: Path) -> str:
    """``lowering`` for ``lowering/cpu.py``, ``ir`` for ``recfx/ir/shard.py``, ``errors`` for ``recfx/errors.py``,
    ``sharding``, which has tests of its own, for ``recfx/collections/sharding/plan.py``, and ``csrc`` for all C++.
    """
    if path.suffix != ".py":
        return "csrc"
    if path.parts[0] != "recfx":
        return path.parts[0]
    inner = [folder for folder in path.parts[2:-1] if folder in BESIDE or Path("tests", folder).is_dir()]
    return inner[-1] if inner else Path(path.parts[1]).stem


def _first(path: Path) -> list[str]:
    """Places below ``tests/`` that come before all others."""
    if path.suffix == ".py":
        return FIRST.get(str(path), [])
    sources = [source for source in sorted(Path("kernels/csrc").rglob("*.cpp")) if path in included_by(source)]
    own = [f"kernels/test_{stem}.py" for stem in (path.stem, *(source.stem for source in sources))]
    return [
        *(place for place in own if Path("tests", place).exists()),
        *(place for source in sources for place in CPP.get(source.stem, [])),
    ]


def _names(path: Path) -> set[str]:
    """Words of the tests that name what is public in a file."""
    if path.suffix != ".py":
        return {path.stem}
    public = [node for node in ast.parse(_text(path)).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {path.stem.strip("_"), *(node.name.strip("_") for node in public)}


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()


@functools.cache
def _words(path: Path) -> set[str]:
    return set(re.findall(r"\w+", _text(path)))


def _places(path: Path) -> list[str]:
    """Places below ``tests/`` for a file, or for its package."""
    package = package_of(path)
    places = BESIDE.get(str(path)) or BESIDE.get(package, [package])
    launches = path.with_name(f"{path.stem}_triton.py").exists()  # the kernels there, from here
    return [*places, *_INTERPRETED] if launches else places


@functools.cache
def _importing() -> dict[str, list[Path]]:
    """The test files that import a module of the product, by the module's name.

    Those that only run in Triton's interpreter or on a device are started by others (``_INTERPRETED``).
    """
    importing: dict[str, list[Path]] = {}
    elsewhere = (Path("tests/ascend/interpreted"), Path("tests/ascend/on_device"), Path("tests/tools"))
    for file in sorted(Path("tests").rglob("test_*.py")):
        if not set(elsewhere).isdisjoint(file.parents):
            continue
        for name in set(re.findall(r"^\s*(?:from|import) (recfx[\w.]*)", _text(file), re.MULTILINE)):
            importing.setdefault(name, []).append(file)
    return importing


def tests_for(path: Path) -> list[str]:
    """Test files for one file of the product, both relative to the root: those of ``FIRST`` and ``CPP``, then of the
    same stem, then those that name more of what is public in it, then the others of its package and those that import
    it. For kernels in Triton, single tests: to interpret all takes minutes.
    """
    if path.stem.endswith("_triton"):
        return tests_that_interpret(path)
    files: dict[Path, int] = {}
    first = _first(path)
    places = _places(path)
    for order, place in enumerate([*first, *places]):
        where = Path("tests", place)
        for file in [where] if where.suffix else sorted(where.rglob("test_*.py")):
            files.setdefault(file, order)
    module = ".".join(path.with_suffix("").parts)
    for file in _importing().get(module if path.parts[0] == "recfx" else f"recfx.{module}", []):
        files.setdefault(file, len(first) + len(places))
    names = _names(path)
    long = {Path("tests", place) for place in LONG}

    def distance(file: Path) -> tuple[bool, int, bool, bool, int, int]:
        order, other_stem = files[file], file.stem.removeprefix("test_") != path.stem.strip("_")
        return file in LAST, min(order, len(first)), other_stem, file in long, -len(names & _words(file)), order

    # Places of this project may be named for a part of it alone; a test keeps them true for the whole.
    return [str(file) for file in sorted(filter(Path.exists, files), key=distance)]
