"""Benchmarks: converted models against what they replace, in one run, ratios first.

``python -m tests.bench [name ...] [--threads 1 2] [--json] [--quick]``. There is one file per benchmark; each defines
``run(setup) -> Iterator[Result]`` and yields one result per pair of contestants. Every iteration looks up newly drawn
ids, all contestants take turns, and their results must agree before anything is timed.

``triton`` names all kernels in Triton at once, on a CUDA device. They need torch and Triton, but neither TorchRec nor
FBGEMM, so that ``python -m tests.bench triton --json`` runs on a GPU machine that has no more.
"""

from __future__ import annotations

# Modules, in the order in which they run; each is imported when it runs.
BENCHMARKS: dict[str, str] = {
    name: f"tests.bench.{name.replace('/', '.')}"
    for name in (
        "forward",
        "train_step",
        "hashed",
        "sequence",
        "sharded",
        "sent_once",
        "plans",
        "small_batch",
        "pipeline",
        "export",
        "hash_index",
        "convert_time",
        # Kernels in C++.
        "pooled_lookup",
        "fused_step",
        "bag_offsets",
        "bucketize",
        # Kernels in Triton.
        "triton/pooled_lookup",
        "triton/fused_optimizer",
        "triton/find_rows",
        "triton/quantized_lookup",
    )
}

# Some contestants use several threads and some do not, so these run with every number of threads asked for.
BY_THREADS = ("forward", "train_step", "hashed", "sequence", "fused_step")
