"""``hashed``: raw 64-bit ids through the index (``dense_rows=0``) against the same rows adopted, forward and step.

The index already holds every id: this is the steady state of training, in which a batch brings few new ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torchrec import KeyedJaggedTensor

import recfx
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.hashing import HashConfig
from recfx.kernels.index.mix64 import mix64
from tests.bench.harness import Contestant, Result, compare_all, must_agree
from tests.bench.own_process import in_own_process
from tests.bench.setup import DISTRIBUTIONS, Ids, Setup
from tests.bench.workload import (
    OPTIMIZERS,
    check_close,
    fill_with_ids,
    output_gradients,
    standard_collection,
    table_batched,
    table_weights,
    with_optimizer,
)

OURS, ADOPTED, TABLE_BATCHED = "raw ids, indexed", "dense ids, adopted", "FBGEMM table-batched, dense ids"
TAKEN = 0.75
"""Share of the rows that have an id; more, and a bucket might be full."""
OPTIMIZER = OPTIMIZERS[2]


def run(setup: Setup) -> Iterator[Result]:
    """Forward in eval mode (find only), and a step of row-wise Adagrad in training mode (find or insert)."""
    for distribution in DISTRIBUTIONS:
        yield from in_own_process(_many_tables, setup, distribution)
    one = replace(setup, tables=1, rows=setup.one_table_rows)
    for distribution in DISTRIBUTIONS:
        yield from in_own_process(_many_tables, one, distribution)


def _many_tables(setup: Setup, distribution: str) -> Iterator[Result]:
    """Two models with their own weights, which must stay equal."""
    universe = int(setup.rows * TAKEN)
    dense = Ids(setup, distribution, universe)
    raw = Ids(setup, distribution, universe, raw=mix64)
    initial = with_optimizer(standard_collection(setup), OPTIMIZER)
    adopted = recfx.convert(with_optimizer(initial, OPTIMIZER), verify=False)
    indexed = recfx.convert(initial, hashing=HashConfig(dense_rows=0), verify=False)
    assert isinstance(indexed, HashEmbeddingBagCollection)
    fill_with_ids(indexed, adopted, universe)
    peer = table_batched(setup, adopted, OPTIMIZER)
    yield from _forward(setup, distribution, indexed, raw.batches(), adopted, dense.batches(), peer)
    del peer
    _check_steps(setup, indexed, raw.batches()[-1], adopted, dense.batches()[-1])
    yield from _step(setup, distribution, indexed, raw.batches(), adopted, dense.batches())


def _forward(
    setup: Setup,
    distribution: str,
    indexed: HashEmbeddingBagCollection,
    raw: list[KeyedJaggedTensor],
    adopted: torch.nn.Module,
    dense: list[KeyedJaggedTensor],
    peer: torch.nn.Module | None,
) -> Iterator[Result]:
    indexed.eval()
    contestants = [
        Contestant(OURS, lambda i: indexed(raw[i]).values()),
        Contestant(ADOPTED, lambda i: adopted(dense[i]).values()),
    ]
    if peer is not None:
        offsets = dense[-1].offsets()
        contestants.append(Contestant(TABLE_BATCHED, lambda i: peer(dense[i].values(), offsets)))
    with torch.no_grad():
        if peer is not None:
            must_agree(contestants)
        facts = {**setup.facts(distribution), "ids_in_index": int(setup.rows * TAKEN)}
        yield from compare_all(_case("forward_eval", setup, distribution), contestants, setup, facts)


def _check_steps(
    setup: Setup,
    indexed: HashEmbeddingBagCollection,
    raw: KeyedJaggedTensor,
    adopted: torch.nn.Module,
    dense: KeyedJaggedTensor,
) -> None:
    """One step of each: the same weights by id."""
    (gradient,) = output_gradients(setup, 1)
    indexed.train()(raw).values().backward(gradient)
    adopted(dense).values().backward(gradient)
    every_id = torch.arange(int(setup.rows * TAKEN))
    for index, ours, theirs in zip(
        indexed.hash_indexes.values(), table_weights(indexed), table_weights(adopted), strict=True
    ):
        check_close("step", theirs[every_id], ours[index.find(mix64(every_id))])


def _step(
    setup: Setup,
    distribution: str,
    indexed: HashEmbeddingBagCollection,
    raw: list[KeyedJaggedTensor],
    adopted: torch.nn.Module,
    dense: list[KeyedJaggedTensor],
) -> Iterator[Result]:
    gradients = output_gradients(setup, 4)
    indexed.train()
    contestants = [
        Contestant(OURS, lambda i: indexed(raw[i]).values().backward(gradients[i % 4])),
        Contestant(ADOPTED, lambda i: adopted(dense[i]).values().backward(gradients[i % 4])),
    ]
    facts = {**setup.facts(distribution), "ids_in_index": int(setup.rows * TAKEN), "optimizer": OPTIMIZER.name}
    yield from compare_all(_case("train_step", setup, distribution), contestants, setup, facts)


def _case(what: str, setup: Setup, distribution: str) -> str:
    return f"hashed/{what}/{setup.tables}_tables/{distribution.replace(' ', '_')}"
