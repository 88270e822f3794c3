"""``triton/per_sample_weights``: the gradient of the weights of ids, float32. FBGEMM has it only together with a step.

Bytes: each id, the row that it names and its gradient, the offsets, and the gradient of the output.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients_triton
from tests.bench.harness import Contestant, Result
from tests.bench.setup import DISTRIBUTIONS, Setup
from tests.bench.triton.on_device import OURS, Workload, race, sized


def run(setup: Setup) -> Iterator[Result]:
    """Both distributions of ids."""
    setup = sized(setup)
    for distribution in DISTRIBUTIONS:
        workload = Workload(setup, distribution)
        weights, gradients = workload.tables(), workload.gradients()

        def ours(
            i: int,
            workload: Workload = workload,
            weights: list[torch.Tensor] = weights,
            given: torch.Tensor = gradients,
        ) -> torch.Tensor:
            arguments = (workload.ids[i], workload.offsets, given, weights, workload.features)
            gradients: torch.Tensor = per_sample_weight_gradients_triton(*arguments)
            return gradients

        contestants = [Contestant(OURS, ours), _torch(workload, weights, gradients)]
        moved = workload.count * (8 + 4 * setup.dim + 4) + workload.offsets.numel() * 8 + gradients.numel() * 4
        yield from race(f"triton/per_sample_weights/{setup.case(distribution)}", workload, contestants, moved)


def _torch(workload: Workload, weights: list[torch.Tensor], gradients: torch.Tensor) -> Contestant:
    scales = torch.rand(workload.count, device=workload.device)
    by_table = [scale.detach().requires_grad_() for scale in workload.by_table(scales)]
    pooled: list[torch.Tensor] = []

    def forward(i: int) -> None:
        pooled[:] = [
            functional.embedding_bag(
                own, weight, workload.bags, mode="sum", include_last_offset=True, per_sample_weights=scale
            )
            for own, weight, scale in zip(workload.by_table(workload.ids[i]), weights, by_table, strict=True)
        ]

    def backward(i: int) -> torch.Tensor:
        return torch.cat(torch.autograd.grad(pooled, by_table, gradients.split(workload.setup.dim, dim=1)))

    return Contestant("embedding_bag's backward", backward, before=forward)
