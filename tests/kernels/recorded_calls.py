"""Records calls of every operator in C++, with what they return, for ``repeat_calls.py``.

python -m tests.kernels.recorded_calls FILE
"""

import copy
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from recfx.kernels.build import library
from recfx.kernels.index import hash_index
from recfx.kernels.index.hash_index import rebuild
from recfx.kernels.lookup.bag_offsets import bag_offsets
from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients
from recfx.kernels.lookup.pooled_lookup import pool_again_, pooled_lookup
from recfx.kernels.route.bucketize import bucketize
from recfx.kernels.route.different_ids import different_ids, sum_rows
from recfx.kernels.step.fused_step import fused_step_
from recfx.kernels.step.row_initialization import initialize_rows
from tests.kernels import bags, finding, indexes, pooled, routes, served, steps
from tests.kernels.repeat_calls import Call

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Recording(TorchDispatchMode):
    """Inside, calls of operators of recfx are kept in ``calls``, except for those that fail."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func.namespace != "recfx":
            return func(*args, **keywords)
        before = copy.deepcopy((args, keywords))
        returned = func(*args, **keywords)
        self.calls.append((func.name().removeprefix("recfx::"), before, copy.deepcopy((returned, args))))
        return returned


def _lookups_and_routes(examples: int) -> None:
    few = settings(max_examples=examples, derandomize=True, database=None, deadline=None)

    @few
    @given(pooled.cases(), st.booleans())
    def pool(case: pooled.Case, mean: bool) -> None:
        _, rows, _ = case.by_operator()
        mean = mean and not case.unpooled
        scale = None if mean else case.scale
        pooled_lookup(rows, case.offsets, case.weights, case.table_of_feature, mean, scale, case.unpooled)
        again = (case.offsets, case.weights, case.table_of_feature)
        is_late = rows % 3 == 0
        outputs = pooled_lookup(rows.masked_fill(is_late, -1), *again, False, case.scale, case.unpooled)
        pool_again_(outputs, rows, is_late, *again, case.scale, case.unpooled)
        if not case.unpooled:
            gradients = torch.randn(pooled_columns(case), generator=torch.Generator().manual_seed(1))
            per_sample_weight_gradients(rows, case.offsets, gradients, case.weights, case.table_of_feature)

    @few
    @given(served.cases())
    def serve(case: served.Case) -> None:
        served.served_lookup(*case.arguments())

    @few
    @given(routes.batches())
    def route(batch: Any) -> None:
        bucketize(*batch)

    @few
    @given(bags.batches())
    def begin_bags(batch: Any) -> None:
        values, lengths, are_offsets, per_key, rows, ids, bags_dtype = batch
        tensors = torch.tensor(values, dtype=ids), torch.tensor(lengths, dtype=bags_dtype)
        bag_offsets(*tensors, are_offsets, per_key, torch.tensor(rows, dtype=torch.int64))

    for run in (pool, serve, route, begin_bags):
        run()


def pooled_columns(case: pooled.Case) -> tuple[int, int]:
    """The shape of the output of a lookup that pools."""
    features = case.table_of_feature
    return (case.offsets.numel() - 1) // len(features), sum(case.weights[table].shape[1] for table in features)


def _steps() -> None:
    pooling: list[dict[str, Any]] = [{}, {"mean": True, "absent": 0.2}, {"weighted": True}, {"unpooled": True}]
    for rule, dtype, how in product(steps.RULE, DTYPES, pooling):
        dims = (7, 33, 130) if dtype == torch.float32 else (4, 20, 64)
        decay = 0.1 if "weighted" in how else 0.0
        made = steps.case(rule, dtype, dims=dims, longest=9, weight_decay=decay, **how)
        fused_step_(*made.arguments())
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        ids = torch.randint(-(2**62), 2**62, (40,), generator=generator)
        initialize_rows(torch.zeros(50, 33, dtype=dtype), torch.arange(5, 45), ids, 7, -0.3, 0.7)
    for dim in (1, 7, 64):
        rows, places = torch.randn(900, dim, generator=generator), torch.randint(0, 500, (900,), generator=generator)
        sum_rows(rows, places, 500)


def _indexes(batches: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tables = indexes.tables(rows=40)[:-1]  # without the one that takes no id when it is full
    buffers, policies = [list(column) for column in zip(*tables, strict=True)]
    for _ in range(batches):
        lengths = torch.randint(0, 30, (len(tables),), generator=generator)
        ends = lengths.cumsum(0).tolist()
        begins = [0, *ends[:-1]]
        ids = torch.randint(-2, 45, (ends[-1],), generator=generator)
        got = indexes.run(ids, begins, ends, tables)
        new = got.report[:, 0].cumsum(0).tolist()
        hash_index.mark_initialized(buffers, policies, got.new_rows, [0, *new[:-1]], new)
        slots, cells, locks = (
            [getattr(buffer, name) for buffer in buffers] for name in ("slot_groups", "side_row", "lock")
        )
        hash_index.find_tables(ids, begins, ends, slots, cells, locks, [policy.own_dense_rows for policy in policies])
        different_ids(ids, lengths.tolist(), [table % 2 == 0 for table in range(len(tables))])
    for buffer, policy in tables:
        rebuild(indexes.copy_of(buffer), policy)
    for number in range(len(finding.TABLES)):
        index = finding.filled(number)
        index.find(torch.tensor([*finding.EXTREMES, 5, 6, 10**12, 6 * 10**12]))
        index.slot_table()


def record(path: Path, examples: int) -> None:
    """Write calls to a file.

    Args:
        path: of the file.
        examples: of each kind of lookup, and batches of each kind of index.
    """
    assert library.load(), library.why_not()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with Recording() as recording:
        _lookups_and_routes(examples)
        _steps()
        _indexes(examples)
    torch.set_num_threads(threads)
    torch.save(recording.calls, path)


if __name__ == "__main__":
    record(Path(sys.argv[1]), 200)
