"""``forward``, ``train_step`` and its part ``fused_step``, against the standard collection and FBGEMM's module."""

import copy
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import recfx
from recfx.optim.rules import rule_of_class
from tests.bench.harness import Contestant, Result, compare_all, must_agree, wall_clock
from tests.bench.own_process import in_own_process
from tests.bench.setup import DISTRIBUTIONS, Ids, Setup
from tests.bench.workload import (
    ADAM,
    LEARNING_RATE,
    OPTIMIZERS,
    Optimizer,
    check_close,
    output_gradients,
    standard_collection,
    table_batched,
    table_weights,
    with_optimizer,
)

OURS, OUR_LOOKUP = "converted collection", "its lookup node alone"
STANDARD, TABLE_BATCHED = "EmbeddingBagCollection", "FBGEMM table-batched"
PAIRS = [(OURS, STANDARD), (OURS, TABLE_BATCHED), (OUR_LOOKUP, TABLE_BATCHED)]
ORDINARY_ROWS = 10_000
STANDARD_EVERY = 8
"""The standard collection makes a gradient as large as the table: its step takes far longer than all others."""


def forward(setup: Setup) -> Iterator[Result]:
    """Ours starts from a KJT with lengths; FBGEMM's module and our lookup node alone get indices and offsets."""
    for distribution in DISTRIBUTIONS:
        yield from _forward(setup, distribution)
    for variant in setup.variants()[1:]:
        yield from _forward(variant, DISTRIBUTIONS[0])
    gc.collect()  # graphs are full of cycles, and the next table is the largest
    yield from _forward(setup.of_one_table(setup.huge_table_rows), DISTRIBUTIONS[0], "huge_table/")


def _forward(setup: Setup, distribution: str, case: str = "") -> Iterator[Result]:
    collection = standard_collection(setup)
    converted: Any = recfx.convert(collection, verify=False)
    peer = table_batched(setup, collection, OPTIMIZERS[0])
    ids = Ids(setup, distribution)
    ours, standard, checked = ids.batches(), ids.batches(), ids.batches()
    for batch in checked:
        batch.offsets()  # computed in advance: the lookup node reads offsets, as the table-batched module does
    lookup = converted.graph_module.lookup
    weights = ids.weights or [None] * len(ids.values)
    contestants = [
        Contestant(OURS, lambda i: converted(ours[i]).values()),
        Contestant(STANDARD, lambda i: collection(standard[i]).values()),
        Contestant(OUR_LOOKUP, lambda i: lookup(checked[i])),
        Contestant(TABLE_BATCHED, lambda i: peer(ids.values[i], ids.offsets, weights[i])),
    ]
    with torch.no_grad():
        must_agree(contestants)
        name = f"forward/{case}{setup.case(distribution)}"
        yield from compare_all(name, contestants, setup, setup.facts(distribution), PAIRS)


def run(setup: Setup) -> Iterator[Result]:
    """Whole steps: of the collection from a KJT; of the table-batched module and our lookup from ids and offsets."""
    for distribution in DISTRIBUTIONS:
        yield from _ordinary(setup, distribution)
    for variant in setup.variants()[1:]:
        yield from _ordinary(variant, DISTRIBUTIONS[0])
    for optimizer in OPTIMIZERS:
        for distribution in DISTRIBUTIONS:
            yield from _run(setup, optimizer, distribution)


def _ordinary(setup: Setup, distribution: str) -> Iterator[Result]:
    """Gradients go to ``weight.grad``, and ``torch.optim.SGD`` steps, as in a script without fused optimizers.

    Both make a gradient as large as the tables, which is most of their time: the tables are smaller here.
    """
    setup = replace(setup, rows=min(setup.rows, ORDINARY_ROWS))
    standard = standard_collection(setup)
    converted = recfx.convert(copy.deepcopy(standard), verify=False)
    ids = Ids(setup, distribution)
    ours, theirs = ids.batches(), ids.batches()
    gradients = output_gradients(setup, 4)
    models = {OURS: (converted, ours), STANDARD: (standard, theirs)}
    optimizers = {name: torch.optim.SGD(model.parameters(), LEARNING_RATE) for name, (model, _) in models.items()}

    def step(name: str, iteration: int) -> None:
        model, batches = models[name]
        optimizers[name].zero_grad()
        model(batches[iteration]).values().backward(gradients[iteration % len(gradients)])
        optimizers[name].step()

    contestants = [Contestant(name, lambda i, name=name: step(name, i)) for name in models]
    for contestant in contestants:
        contestant.run(-1)
    for table, (mine, other) in enumerate(zip(table_weights(converted), table_weights(standard), strict=True)):
        check_close(f"table {table}", other, mine)
    facts = {**setup.facts(distribution), "optimizer": "torch.optim.SGD"}
    yield from compare_all(f"train_step/ordinary/{setup.case(distribution)}", contestants, setup, facts)


def _run(setup: Setup, optimizer: Optimizer, distribution: str) -> Iterator[Result]:
    initial = standard_collection(setup)
    standard = with_optimizer(initial, optimizer)
    converted = recfx.convert(with_optimizer(initial, optimizer), verify=False)
    lookup_only = recfx.convert(with_optimizer(initial, optimizer), verify=False)
    peer = table_batched(setup, initial, optimizer)
    ids = Ids(setup, distribution)
    ours, theirs, checked = ids.batches(), ids.batches(), ids.batches()
    for batch in checked:
        batch.offsets()
    gradients = output_gradients(setup, 4)
    lookup = lookup_only.graph_module.lookup

    def gradient(iteration: int) -> torch.Tensor:
        return gradients[iteration % len(gradients)]

    contestants = [
        Contestant(OURS, lambda i: converted(ours[i]).values().backward(gradient(i))),
        Contestant(OUR_LOOKUP, lambda i: lookup(checked[i]).backward(gradient(i))),
        Contestant(STANDARD, lambda i: standard(theirs[i]).values().backward(gradient(i)), every=STANDARD_EVERY),
        Contestant(TABLE_BATCHED, lambda i: peer(ids.values[i], ids.offsets).backward(gradient(i))),
    ]
    for contestant in contestants:
        contestant.run(-1)
    tables = (converted, lookup_only, standard)
    weights = zip(*(table_weights(model) for model in tables), peer.split_embedding_weights(), strict=True)
    for table, (mine, *others) in enumerate(weights):
        for contestant, other in zip(contestants[1:], others, strict=True):
            check_close(f"{optimizer.name}, table {table}, {contestant.name}", other, mine)
    name = f"train_step/{optimizer.name}/{distribution.replace(' ', '_')}"
    facts = {**setup.facts(distribution), "optimizer": optimizer.name}
    yield from compare_all(name, contestants, setup, facts, PAIRS)


MOST_ROWS = 2**24
"""Of larger tables, FBGEMM leaves out some of the rows that it should step."""

_ROWS_AT_ONCE = 2**20
FUSED = "fused step in C++"


def fused_step(setup: Setup) -> Iterator[Result]:
    """The backward of all tables with the optimizer's step in it: every rule, both distributions of ids; then one table
    that has all positions, and a huge one.

    The peer of Adam, which FBGEMM has not on the CPU, is its Adagrad. The limit beside each result is the time that a
    copy takes for the bytes that a step has to move: each position and its bag's gradient once, and every touched row
    with its state, read and written.
    """
    copied = _copy_gb_s()
    for optimizer in (*OPTIMIZERS, ADAM):
        for distribution in DISTRIBUTIONS:
            yield from in_own_process(_backward_with_step, setup, optimizer, distribution, copied)
    one = setup.of_one_table(setup.tables * setup.rows)
    huge = setup.of_one_table(min(setup.huge_table_rows, MOST_ROWS))
    yield from in_own_process(_backward_with_step, one, OPTIMIZERS[0], DISTRIBUTIONS[0], copied, "one table")
    yield from in_own_process(_backward_with_step, huge, OPTIMIZERS[2], DISTRIBUTIONS[0], copied, "huge table")


def _backward_with_step(
    setup: Setup, optimizer: Optimizer, distribution: str, copied: float, case: str = ""
) -> Iterator[Result]:
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
        _backward(FUSED, lambda i: lookup(batches[i]), gradients),
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
