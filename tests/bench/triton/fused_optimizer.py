"""``triton/fused_optimizer``: the backward of all tables and one step of each rule, for gradients of the output.

Forwards are not timed. Peers: the sparse backward of ``embedding_bag`` with the sparse step of ``torch.optim`` (there
is none of row-wise Adagrad: the backward alone), and FBGEMM's backward with its step in it. All agree on the weights
after their first step.

Bytes: each id and the gradient of its bag, and every row that the batch touches, with its state: read and written once.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from recfx.optim.fused_step_op import fused_step_triton_, rules_in_triton, triton_module
from recfx.optim.rules.rule import Rule
from tests.bench.harness import Contestant, Result
from tests.bench.setup import DISTRIBUTIONS, Setup
from tests.bench.triton.on_device import FBGEMM, OURS, Workload, has_fbgemm, race, sized

GROUP = {"lr": 0.0625, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.0}
WITH_STEP, ALONE = "embedding_bag and torch.optim", "embedding_bag's backward alone"
_SPARSE: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=GROUP["lr"]),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=GROUP["lr"], eps=GROUP["eps"]),
    "adam": lambda weights: torch.optim.SparseAdam(weights, lr=GROUP["lr"], eps=GROUP["eps"], betas=GROUP["betas"]),
}


def run(setup: Setup) -> Iterator[Result]:
    """Every rule, both distributions of ids."""
    setup = sized(setup)
    for distribution in DISTRIBUTIONS:
        workload = Workload(setup, distribution)
        gradients, touched = workload.gradients(), workload.touched()
        for rule in rules_in_triton():
            state = sum(1 if state.per_row else setup.dim for state in rule.states)
            moved = workload.count * (8 + 4 * setup.dim) + touched * 2 * 4 * (setup.dim + state)
            name = f"triton/fused_optimizer/{setup.case(distribution)}/{rule.name}"
            contestants = [Contestant(OURS, _ours(workload, gradients, rule)), _torch(workload, gradients, rule)]
            if has_fbgemm(workload.device):
                contestants.append(_fbgemm(workload, gradients, rule))
            yield from race(name, workload, contestants, moved, optimizer=rule.name, rows_touched=touched)


def _some_rows(workload: Workload, weights: list[torch.Tensor]) -> torch.Tensor:
    """What is compared: rows of the first and the last table that the last batch names."""
    first, *_, last = workload.by_table(workload.ids[-1])
    return torch.cat([weights[0].detach()[first[:64]], weights[-1].detach()[last[:64]]])


def _ours(workload: Workload, gradients: torch.Tensor, rule: Rule) -> Callable[[int], object]:
    weights = workload.tables()
    states = [
        [torch.zeros(state.shape(*table.shape), device=table.device) for table in weights] for state in rule.states
    ]
    first, second = (*states, [], [])[:2]
    of_rule = (triton_module(rule), rule.has_row_state)
    steps = [0]

    def step(i: int) -> torch.Tensor | None:
        steps[0] += 1
        numbers = list(rule.step_numbers(float(steps[0]), GROUP))
        tables = (weights, first, second, workload.features, [True] * len(weights))
        fused_step_triton_(workload.ids[i], workload.offsets, gradients, *tables, *of_rule, numbers, False, None)
        return _some_rows(workload, weights) if i < 0 else None

    return step


def _torch(workload: Workload, gradients: torch.Tensor, rule: Rule) -> Contestant:
    weights = [table.requires_grad_() for table in workload.tables()]
    make = _SPARSE.get(rule.name)
    optimizer = None if make is None else make(weights)

    pooled: list[torch.Tensor] = []

    def forward(i: int) -> None:
        pooled[:] = workload.embedding_bags(i, weights, sparse=True)

    def step(i: int) -> torch.Tensor | None:
        torch.autograd.backward(pooled, gradients.split(workload.setup.dim, dim=1))
        if optimizer is not None:
            optimizer.step()
        for weight in weights:
            weight.grad = None
        return _some_rows(workload, weights) if i < 0 and optimizer is not None else None

    return Contestant(WITH_STEP if optimizer else ALONE, step, before=forward)


def _fbgemm(workload: Workload, gradients: torch.Tensor, rule: Rule) -> Contestant:
    from tests.bench.fbgemm_module import table_batched

    @cache
    def module() -> Any:
        return table_batched(workload.tables(), rule.name, GROUP["lr"], GROUP["eps"])

    pooled: list[torch.Tensor] = []

    def forward(i: int) -> None:
        pooled[:] = [module()(workload.ids[i], workload.offsets)]

    def step(i: int) -> torch.Tensor | None:
        pooled[0].backward(gradients)
        return _some_rows(workload, module().split_embedding_weights()) if i < 0 else None

    return Contestant(FBGEMM, step, before=forward)
