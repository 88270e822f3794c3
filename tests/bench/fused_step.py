"""``fused_step``: the backward of all tables with the optimizer's step in it, without the forward.

The peer is FBGEMM's table-batched module; for Adam, which it has not on the CPU, its Adagrad. The limit beside each
result is the time that a copy takes for the bytes that a step has to move: each position and its bag's gradient once,
and every touched row with its state, read and written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch

import recfx
from recfx.optim.rules import rule_of_class
from tests.bench.harness import Contestant, Result, compare_all, wall_clock
from tests.bench.own_process import in_own_process
from tests.bench.setup import DISTRIBUTIONS, Ids, Setup
from tests.bench.workload import (
    ADAM,
    OPTIMIZERS,
    Optimizer,
    check_close,
    output_gradients,
    standard_collection,
    table_batched,
    table_weights,
    with_optimizer,
)

MOST_ROWS = 2**24
"""Of larger tables, FBGEMM leaves out some of the rows that it should step."""

_ROWS_AT_ONCE = 2**20
OURS, TABLE_BATCHED = "fused step in C++", "FBGEMM table-batched"


def run(setup: Setup) -> Iterator[Result]:
    """Every rule, both distributions of ids; then one table that has all positions, and a huge one."""
    copied = _copy_gb_s()
    for optimizer in (*OPTIMIZERS, ADAM):
        for distribution in DISTRIBUTIONS:
            yield from in_own_process(_run, setup, optimizer, distribution, copied)
    one = setup.of_one_table(setup.tables * setup.rows)
    huge = setup.of_one_table(min(setup.huge_table_rows, MOST_ROWS))
    yield from in_own_process(_run, one, OPTIMIZERS[0], DISTRIBUTIONS[0], copied, "one table")
    yield from in_own_process(_run, huge, OPTIMIZERS[2], DISTRIBUTIONS[0], copied, "huge table")


def _run(setup: Setup, optimizer: Optimizer, distribution: str, copied: float, case: str = "") -> Iterator[Result]:
    initial = standard_collection(setup)
    converted = recfx.convert(with_optimizer(initial, optimizer), verify=False)
    has_peer = optimizer.name != ADAM.name
    peer = table_batched(setup, initial, optimizer if has_peer else OPTIMIZERS[1])
    del initial  # the largest table is a quarter of a common machine's memory
    ids = Ids(setup, distribution)
    batches = ids.batches()
    gradients = output_gradients(setup, 4)
    lookup = converted.graph_module.lookup
    contestants = [
        _backward(OURS, lambda i: lookup(batches[i]), gradients),
        _backward(TABLE_BATCHED, lambda i: peer(ids.values[i], ids.offsets), gradients),
    ]
    for contestant in contestants:
        contestant.before(-1)
        contestant.run(-1)
    if has_peer:
        for table, pair in enumerate(zip(table_weights(converted), peer.split_embedding_weights(), strict=True)):
            for ours, theirs in zip(*(weight.split(_ROWS_AT_ONCE) for weight in pair), strict=True):
                check_close(f"{optimizer.name}, table {table}", theirs, ours)
    limit = _bytes_moved(setup, optimizer, ids) / copied / 1e6
    facts = {
        **setup.facts(distribution),
        "optimizer": optimizer.name if has_peer else f"{optimizer.name}, FBGEMM's Adagrad",
        "copy of as many bytes, ms": round(limit, 2),
    }
    name = "/".join(filter(None, ("fused_step", case, optimizer.name, distribution))).replace(" ", "_")
    yield from compare_all(name, contestants, setup, facts)


def _backward(name: str, forward: Callable[[int], torch.Tensor], gradients: list[torch.Tensor]) -> Contestant:
    pooled: list[torch.Tensor] = []

    def before(i: int) -> None:
        pooled[:] = [forward(i)]

    return Contestant(name, lambda i: pooled[0].backward(gradients[i % len(gradients)]), before=before)


def _bytes_moved(setup: Setup, optimizer: Optimizer, ids: Ids) -> float:
    """Of one step, as a mean over the batches."""
    rule = rule_of_class(optimizer.standard)
    assert rule is not None
    state = sum(1 if state.per_row else setup.dim for state in rule.states)
    touched = statistics.mean(
        sum(part.unique().numel() for part in values.chunk(setup.tables)) for values in ids.dense[:4]
    )
    return ids.dense[0].numel() * (8 + 4 * setup.dim) + touched * 2 * 4 * (setup.dim + state)


def _copy_gb_s() -> float:
    """How fast torch copies 256 MB: bytes read and written, in GB per second."""
    source = torch.ones(2**26)
    target = torch.empty_like(source)
    target.copy_(source)
    fastest = min(wall_clock(lambda: target.copy_(source)) for _ in range(7))
    return 2 * source.nbytes / fastest / 1e6
