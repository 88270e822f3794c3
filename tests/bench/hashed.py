"""``hashed``: raw 64-bit ids through the index (``dense_rows=0``) against the same rows adopted, forward and step.

The index holds every id already: this is the steady state of training, where a batch brings few new ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import recfx
from recfx.collection import HashEmbeddingBagCollection
from recfx.hashing import HashConfig
from recfx.kernels.mix64 import mix64
from tests.bench.harness import Contestant, Result, compare, take_turns
from tests.bench.workload import (
    DISTRIBUTIONS,
    OPTIMIZERS,
    Ids,
    Setup,
    check_close,
    output_gradients,
    standard_collection,
    table_weights,
    with_optimizer,
)

OURS, ADOPTED = "raw ids, indexed", "dense ids, adopted"
TAKEN = 0.75
"""Share of the rows that have an id; more, and a bucket might be full."""
OPTIMIZER = OPTIMIZERS[2]


def run(setup: Setup) -> Iterator[Result]:
    """Forward in eval mode (find only), and a step of row-wise Adagrad in training mode (find or insert)."""
    universe = int(setup.rows * TAKEN)
    for distribution in DISTRIBUTIONS:
        dense = Ids(setup, distribution, universe)
        raw = Ids(setup, distribution, universe, raw=mix64)
        initial = with_optimizer(standard_collection(setup), OPTIMIZER)
        adopted = recfx.convert(with_optimizer(initial, OPTIMIZER), verify=False)
        indexed = recfx.convert(initial, hashing=HashConfig(dense_rows=0), verify=False)
        assert isinstance(indexed, HashEmbeddingBagCollection)
        _fill(indexed, adopted, universe)
        yield from _forward(setup, distribution, indexed, raw, adopted, dense)
        yield from _step(setup, distribution, indexed, raw, adopted, dense)


def _fill(indexed: HashEmbeddingBagCollection, adopted: torch.nn.Module, universe: int) -> None:
    """Give every id a row, in a random order, with the weights that its dense id has in the adopted collection."""
    generator = torch.Generator().manual_seed(3)
    for index, ours, theirs in zip(
        indexed.hash_indexes.values(), table_weights(indexed), table_weights(adopted), strict=True
    ):
        dense = torch.randperm(universe, generator=generator)
        rows = index.find_or_insert(mix64(dense))
        with torch.no_grad():
            ours[rows] = theirs[dense]


def _forward(
    setup: Setup,
    distribution: str,
    indexed: HashEmbeddingBagCollection,
    raw: Ids,
    adopted: torch.nn.Module,
    dense: Ids,
) -> Iterator[Result]:
    raw_batches, dense_batches = raw.batches(), dense.batches()
    indexed.eval()
    contestants = [
        Contestant(OURS, lambda i: indexed(raw_batches[i]).values()),
        Contestant(ADOPTED, lambda i: adopted(dense_batches[i]).values()),
    ]
    with torch.no_grad():
        check_close("forward", contestants[1].run(-1), contestants[0].run(-1))
        times = take_turns(contestants, setup.iterations, setup.warm_up)
    facts = {**setup.facts(distribution), "ids_in_index": int(setup.rows * TAKEN)}
    yield compare(f"hashed/forward_eval/{distribution.replace(' ', '_')}", times, OURS, ADOPTED, facts)


def _step(
    setup: Setup,
    distribution: str,
    indexed: HashEmbeddingBagCollection,
    raw: Ids,
    adopted: torch.nn.Module,
    dense: Ids,
) -> Iterator[Result]:
    raw_batches, dense_batches = raw.batches(), dense.batches()
    gradients = output_gradients(setup, 4)
    indexed.train()
    contestants = [
        Contestant(OURS, lambda i: indexed(raw_batches[i]).values().backward(gradients[i % 4])),
        Contestant(ADOPTED, lambda i: adopted(dense_batches[i]).values().backward(gradients[i % 4])),
    ]
    for contestant in contestants:
        contestant.run(-1)
    every_id = torch.arange(int(setup.rows * TAKEN))
    for index, ours, theirs in zip(
        indexed.hash_indexes.values(), table_weights(indexed), table_weights(adopted), strict=True
    ):
        check_close("step", theirs[every_id], ours[index.find(mix64(every_id))])
    times = take_turns(contestants, setup.iterations, setup.warm_up)
    facts = {**setup.facts(distribution), "ids_in_index": len(every_id), "optimizer": OPTIMIZER.name}
    yield compare(f"hashed/train_step/{distribution.replace(' ', '_')}", times, OURS, ADOPTED, facts)
