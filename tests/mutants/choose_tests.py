"""Which tests judge a file: those beside it, the nearest first."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.mutants.compile_once import included_by

_INTERPRETED = ["ascend/test_interpreted_targets.py", "ascend/test_interpreted.py"]
_IN_TRITON = (
    "bucketize",
    "find_rows",
    "fused_step",
    "mix64",
    "per_sample_weights",
    "pooled_lookup",
    "quantized_lookup",
)
BESIDE = {
    "passes": ["passes", "collections/test_kinds_of_tables.py", "optim/test_settings_of_tables.py", "ir"],
    **{
        f"passes/{stem}.py": ["passes", "exporter/test_export.py", "exporter/test_every_format.py"]
        for stem in ("freeze_indexes", "quantize_rows", "fuse_served_lookup")
    },
    "passes/insert_dist.py": ["passes", "sharding/test_types.py"],
    "ir/node_values.py": ["passes", "sharding/test_wire.py", "sharding/test_explain.py"],
    "runtime": ["runtime", "collections", "passes", "lowering"],
    "runtime/input_dist.py": [
        "sharding/test_wire.py", "sharding/test_out_of_step.py", "sharding/test_corner_cases.py",
        "sharding/test_stock_pipeline.py", "sharding/test_types.py", "runtime", "kernels/test_bucketize.py",
    ],
    "runtime/output_dist.py": [
        "sharding/test_types.py", "sharding/test_uneven_columns.py",
        "sharding/test_wire.py", "sharding/test_corner_cases.py",
    ],
    "runtime/dist_groups.py": [
        "sharding/test_dist_groups.py", "sharding/test_shard_trained.py", "sharding/test_types.py",
    ],
    "runtime/find_ids.py": ["runtime", "pipeline", "collections"],
    "runtime/transfers.py": ["ascend/npu_runtime", "runtime"],
    "runtime/training_checks.py": ["collections", "sharding/test_ddp.py", "planner/test_torchrec_entry.py"],
    "hashing": ["hashing", "collections", "kernels"],
    **{f"hashing/{stem}.py": ["hashing", "sharding/test_state.py"] for stem in ("slices", "row_move")},
    "sharding": ["sharding", "planner"],
    "checkpoint": ["checkpoint", "sharding/test_checkpoint.py", "sharding/test_checkpoint_optimizers.py"],
    "verification": ["verification", "conversion"],
    "lowering": ["lowering", "runtime/test_default_device.py", "kernels", "optim"],
    "lowering/profiler_ranges.py": ["runtime/test_profile.py", "lowering"],
    "lowering/lookup.py": ["lowering/test_triton_limits.py", "ascend/test_interpreted_targets.py"],
    "optim/fused_step_op.py": ["lowering/test_triton_limits.py", "ascend/test_interpreted_targets.py"],
    **{f"optim/{rule}_triton.py": _INTERPRETED for rule in ("sgd", "adagrad", "rowwise_adagrad", "adam")},
    **{f"kernels/{stem}_triton.py": _INTERPRETED[::-1] for stem in _IN_TRITON},
    "kernels/launch.py": ["lowering/test_triton_limits.py", "kernels/test_tiling.py", *_INTERPRETED],
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
    "replacement": ["conversion"],
    "discovery": ["discovery", "verification", "inspect", "conversion"],
    "inspect": ["inspect", "commandline"],
    "errors": ["test_diagnostics.py", "checkpoint/test_refusals.py", "conversion/test_refusals.py"],
    "version": ["test_packaging.py"],
    "__init__": ["test_structure.py", "test_packaging.py"],
    "__main__": ["commandline"],
}  # fmt: skip
"""Folders and files below ``tests/`` for packages and files; other packages have the folder of their name."""

_SHARDING = {
    "awaitables": ["test_batch_steps", "test_stock_pipeline", "test_types"],
    "batch_steps": ["test_batch_steps", "test_stock_pipeline", "test_step_once"],
    "collection": ["test_copies", "test_state", "test_explain", "test_ddp", "test_plan", "test_optimizer_settings"],
    "data_parallel": ["test_plan", "test_types"],
    "end_of_data": ["test_batch_steps", "test_stock_pipeline"],
    "gather": ["test_unconvert", "test_uneven_columns", "test_parts_of_the_world"],
    "held_interrupts": ["test_held_interrupts"],
    "late_backwards": ["test_histories"],
    "load_state": ["test_state", "test_refusals", "test_parts_of_the_world"],
    "optimizer": ["test_optimizer_state", "test_state"],
    "optimizer_settings": ["test_optimizer_settings", "test_shard_trained"],
    "out_of_step": ["test_batch_steps", "test_refusals", "test_out_of_step"],
    "pipeline_stages": ["test_batch_steps", "test_types", "test_stock_pipeline"],
    "plan": ["test_plan"],
    "ranks_agree": ["test_ranks_agree"],
    "sharded_tables": [
        "test_state",
        "test_explain",
        "test_shard_trained",
        "test_optimizer_state",
        "test_step_once",
    ],
    "state": ["test_pieces", "test_state", "test_parts_of_the_world"],
    "ways_back": ["test_plan", "test_wire", "test_types"],
    "whole_plan": ["test_plan"],
    **{stem: ["test_plan", "test_types"] for stem in ("by_columns", "by_rows", "_planned")},
}
_LOADING = ["collections/test_interrupts", "collections/test_state", "sharding/test_state"]
_HASHING = {
    "arguments": ["hashing/test_index", "hashing/test_slices", "hashing/test_meta"],
    "config": ["hashing/test_config"],
    "identity": ["hashing/test_state", "hashing/test_state_of_policies"],
    "index": ["hashing/test_holds", "hashing/test_index", "hashing/test_meta", "hashing/test_state_of_policies"],
    "row_move": ["hashing/test_row_move", "hashing/test_holds", "hashing/test_slices"],
    "slices": ["hashing/test_holds", "hashing/test_slices"],
    "state": ["hashing/test_holds", "hashing/test_state", "hashing/test_state_of_policies", "hashing/test_index"],
    "storage": ["hashing/test_holds", "hashing/test_state", "hashing/test_index", "hashing/test_threads", *_LOADING],
    "usable_share": ["hashing/test_usable_share"],
}
FIRST = {f"sharding/{stem}.py": [f"sharding/{each}.py" for each in files] for stem, files in _SHARDING.items()}
FIRST |= {f"hashing/{stem}.py": [f"{each}.py" for each in files] for stem, files in _HASHING.items()}
"""Files below ``tests/`` that come before all others: to run all that need real ranks takes minutes."""
for _stem in ("awaitables", "batch_steps", "pipeline_stages"):
    FIRST[f"sharding/{_stem}.py"].append("pipeline/test_train_pipeline.py")
FIRST["sharding/sharded_tables.py"].append("ascend/npu_runtime/test_sharded.py")
_CHECKPOINT = {
    **{name: ["sharding/test_checkpoint.py"] for name in ("sharded", "table_names")},
    "peers": ["sharding/test_checkpoint.py"],
    "storage": ["checkpoint/test_storage.py", "sharding/test_checkpoint.py"],
    "load": ["sharding/test_checkpoint_optimizers.py", "checkpoint/test_refusals.py"],
    "ordinary": ["checkpoint/test_ordinary.py", "sharding/test_checkpoint_optimizers.py"],
    "save": [f"checkpoint/test_{name}.py" for name in ("crash", "directory", "refusals")],
}
FIRST.update({f"checkpoint/{stem}.py": files for stem, files in _CHECKPOINT.items()})
LAST = (Path("tests/checkpoint/test_round_trip.py"), Path("tests/checkpoint/test_crash.py"))
"""They take long, and others beside them notice nearly as much."""

LONG = {
    "runtime/test_batch_fuzz.py", "runtime/test_base.py",
    "collections/test_batches.py", "collections/test_interrupts.py", "kernels/test_thread_safety.py",
    *(f"exporter/test_{name}.py" for name in ("auc", "memory", "pt2", "serve_cpp", "serve_cpp_process", "sharded")),
    "exporter/test_zoo.py",
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
        return FIRST.get(f"{package_of(path)}/{path.name}", [])
    sources = [source for source in sorted(Path("kernels/csrc").rglob("*.cpp")) if path in included_by(source)]
    own = [f"kernels/test_{stem}.py" for stem in (path.stem, *(source.stem for source in sources))]
    return [
        *(each for each in own if Path("tests", each).exists()),
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


def tests_for(path: Path) -> list[str]:
    """Test files for one file of the product, both relative to the root: those of ``FIRST`` and ``CPP``, then of the
    same stem, then those that name more of what is public in it, then the others of its package.
    """
    package = package_of(path)
    files: dict[Path, int] = {}
    first = _first(path)
    places = BESIDE.get(f"{package}/{path.name}") or BESIDE.get(package, [package])
    for order, place in enumerate([*first, *places]):
        where = Path("tests", place)
        for file in [where] if where.suffix else sorted(where.rglob("test_*.py")):
            files.setdefault(file, order)
    names = _names(path)
    long = {Path("tests", each) for each in LONG}

    def distance(file: Path) -> tuple[bool, int, bool, bool, int, int]:
        order, other_stem = files[file], file.stem.removeprefix("test_") != path.stem.strip("_")
        return file in LAST, min(order, len(first)), other_stem, file in long, -len(names & _words(file)), order

    return [str(file) for file in sorted(files, key=distance)]
