"""Benchmarks: converted models against what they replace, in one run, ratios first.

``python -m tests.bench [name ...] [--threads 1 2] [--json] [--quick]``. There is one file per benchmark; each defines
``run(setup) -> Iterator[Result]`` and yields one result per pair of contestants. Every iteration looks up newly drawn
ids, all contestants take turns, and their results must agree before anything is timed.
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
    # One per kernel family, under the name of the family.
    "pooled_lookup": pooled_lookup.run,
    "bag_offsets": bag_offsets.run,
    "bucketize": bucketize.run,
    "row_initialization": row_initialization.run,
    "index_rebuild": index_rebuild.run,
}

# Some contestants use several threads and some do not, so these run with every number of threads asked for.
BY_THREADS = ("forward", "train_step", "hashed")
