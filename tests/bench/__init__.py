"""Benchmarks: converted models against what they replace, in one run, ratios first.

``python -m tests.bench [name ...] [--threads 1 2] [--json] [--quick]``. Each benchmark is a function
``run(setup) -> Iterator[Result]``, which yields one result per pair of contestants; most have a file. Every iteration
looks up newly drawn ids, all contestants take turns, and their results must agree before anything is timed.

``triton`` names all kernels in Triton at once, on a CUDA device. They need torch and Triton, but neither TorchRec nor
FBGEMM, so that ``python -m tests.bench triton --json`` runs on a GPU machine that has no more.
"""

# A module, and the function of it, in the order in which they run; each is imported when it runs.
BENCHMARKS: dict[str, str] = {
    "forward": "tests.bench.train_step:forward",
    **{
        name: f"tests.bench.{name}:run"
        for name in (
            "train_step", "hashed", "sequence", "sharded", "plans",
            "pipeline", "export", "hash_index", "convert_time",
        )
    },
    "fused_step": "tests.bench.train_step:fused_step",
    # One per kernel, under its name.
    **{
        name: f"tests.bench.kernels:{name}"
        for name in ("bag_offsets", "bucketize")
    },
    "triton/fused_optimizer": "tests.bench.triton.fused_optimizer:run",
    "triton/models": "tests.bench.triton.models:run",
    "triton/find_rows": "tests.bench.triton.find_rows:run",
    **{
        f"triton/{name}": f"tests.bench.triton.lookups:{name}"
        for name in ("pooled_lookup", "per_sample_weights", "quantized_lookup")
    },
}  # fmt: skip

# Some contestants use several threads and some do not, so these run with every number of threads asked for.
BY_THREADS = ("forward", "train_step", "hashed", "sequence", "fused_step")
