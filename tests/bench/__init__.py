"""Benchmarks: converted models against what they replace, in one run, ratios first.

``python -m tests.bench [name ...] [--threads 1 2] [--json] [--quick]``. One file a benchmark; each defines
``run(setup) -> Iterator[Result]`` and yields a result a pair of contestants. Every iteration looks up ids drawn anew,
all contestants take turns, and they must agree in numbers before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.bench import (
    bag_offsets,
    bucketize,
    convert_time,
    forward,
    hash_index,
    hashed,
    index_rebuild,
    pipeline,
    pooled_lookup,
    row_initialization,
    sharded,
    train_step,
)
from tests.bench.harness import Result
from tests.bench.workload import Setup

# In the order in which they run.
BENCHMARKS: dict[str, Callable[[Setup], Iterator[Result]]] = {
    "forward": forward.run,
    "train_step": train_step.run,
    "hashed": hashed.run,
    "sharded": sharded.run,
    "pipeline": pipeline.run,
    "hash_index": hash_index.run,
    "convert_time": convert_time.run,
    # One per family of kernels, under its name.
    "pooled_lookup": pooled_lookup.run,
    "bag_offsets": bag_offsets.run,
    "bucketize": bucketize.run,
    "row_initialization": row_initialization.run,
    "index_rebuild": index_rebuild.run,
}

# What is compared shares its work among threads, or does not: these run with every number of threads asked for.
BY_THREADS = ("forward", "train_step", "hashed")
