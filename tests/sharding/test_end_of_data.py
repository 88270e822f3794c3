"""What is kept of the calls of a process group that were started."""

from __future__ import annotations

import gc

from recfx.collections.sharding.end_of_data import calls_under_way
from tests.sharding.cases import Case, Table, batches, build, shard
from tests.sharding.ranks import ranks

CASE = Case((Table("rows", 24, 8, ("f0",), "SUM", ("row_wise",)),))


def kept_after_batches(rank: int, world_size: int) -> list[tuple[int, int]]:
    """How many calls are kept once each batch was started, and once it has run; the third batch is discarded."""
    module = shard(CASE, build(CASE)[0], world_size)
    under_way, kept, contexts = calls_under_way(module.groups.ids), [], []
    gc.collect()  # what the tests before have left goes with the first batch
    for number, step in enumerate(batches(CASE, world_size, 4)):
        context = module.create_context()
        arrived = module.input_dist(context, step[rank]).wait().wait()
        started = len(under_way._started)
        if number == 2:
            del context, arrived
            gc.collect()
        else:
            contexts.append(context)  # as a pipeline may keep it
            module.compute_and_output_dist(context, arrived).values()
        kept.append((started, len(under_way._started)))
    return kept[1:]


def test_a_call_that_has_run_or_was_discarded_is_not_kept() -> None:
    """What was discarded goes when the next one runs."""
    assert ranks(2).run(kept_after_batches) == [[(1, 0), (1, 1), (2, 0)]] * 2
