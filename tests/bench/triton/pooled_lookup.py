"""``triton/pooled_lookup``: the forward of all tables in one launch, SUM, float32 and float16.

Bytes: each id and the row that it names, the offsets, and the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from tests.bench.harness import Contestant, Result
from tests.bench.setup import DISTRIBUTIONS, Setup
from tests.bench.triton.on_device import FBGEMM, OURS, TORCH, Workload, has_fbgemm, race, sized


def run(setup: Setup) -> Iterator[Result]:
    """Both distributions of ids, both dtypes."""
    setup = sized(setup)
    for distribution in DISTRIBUTIONS:
        workload = Workload(setup, distribution)
        for dtype in (torch.float32, torch.float16):
            weights = [table.to(dtype) for table in workload.tables()]
            contestants = [
                Contestant(OURS, _ours(workload, weights)),
                Contestant(TORCH, _one_by_one(workload, weights)),
            ]
            if dtype == torch.float32 and has_fbgemm(workload.device):
                contestants.append(Contestant(FBGEMM, _fbgemm(workload, weights)))
            row = setup.dim * weights[0].element_size()
            output = setup.batch * setup.tables * setup.dim * 4
            moved = workload.count * (8 + row) + workload.offsets.numel() * 8 + output
            name = f"triton/pooled_lookup/{setup.case(distribution)}/{str(dtype).removeprefix('torch.')}"
            tolerance = 1e-4 if dtype == torch.float32 else 2e-3 * setup.bag_length  # embedding_bag sums in the dtype
            yield from race(name, workload, contestants, moved, tolerance, dtype=str(dtype))


def _ours(workload: Workload, weights: list[torch.Tensor]) -> Callable[[int], object]:
    return lambda i: pooled_lookup_triton(workload.ids[i], workload.offsets, weights, workload.features, False, None)


def _one_by_one(workload: Workload, weights: list[torch.Tensor]) -> Callable[[int], object]:
    return lambda i: torch.cat(workload.embedding_bags(i, weights), dim=1).float()


def _fbgemm(workload: Workload, weights: list[torch.Tensor]) -> Callable[[int], object]:
    from tests.bench.fbgemm_module import table_batched

    @cache
    def module() -> Any:
        return table_batched(weights, "sgd")

    def pool(i: int) -> object:
        with torch.no_grad():
            return module()(workload.ids[i], workload.offsets)

    return pool
