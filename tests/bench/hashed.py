"""``hashed``: raw 64-bit ids through the index (``dense_rows=0``) against the same rows adopted, forward and step.

The index already holds every id: this is the steady state of training, in which a batch brings few new ids.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

import recfx
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
    dense, raw = Ids(setup, distribution, universe), Ids(setup, distribution, universe, raw=mix64)
    initial = with_optimizer(standard_collection(setup), OPTIMIZER)
    adopted = recfx.convert(with_optimizer(initial, OPTIMIZER), verify=False)
    indexed = recfx.convert(initial, hashing=HashConfig(dense_rows=0), verify=False).eval()
    fill_with_ids(indexed, adopted, universe)
    peer = table_batched(setup, adopted, OPTIMIZER)
    of_indexed, of_adopted = raw.batches(), dense.batches()
    contestants = [
        Contestant(OURS, lambda i: indexed(of_indexed[i]).values()),
        Contestant(ADOPTED, lambda i: adopted(of_adopted[i]).values()),
        Contestant(TABLE_BATCHED, lambda i, peer=peer: peer(dense.values[i], dense.offsets)),
    ]
    facts = {**setup.facts(distribution), "ids_in_index": universe}
    case = f"{setup.tables}_tables/{distribution.replace(' ', '_')}"
    with torch.no_grad():
        must_agree(contestants)
        yield from compare_all(f"hashed/forward_eval/{case}", contestants, setup, facts)
    del peer, contestants
    gradients, of_indexed, of_adopted = output_gradients(setup, 4), raw.batches(), dense.batches()
    contestants = [
        Contestant(OURS, lambda i: indexed(of_indexed[i]).values().backward(gradients[i % 4])),
        Contestant(ADOPTED, lambda i: adopted(of_adopted[i]).values().backward(gradients[i % 4])),
    ]
    indexed.train()
    for contestant in contestants:
        contestant.run(-1)
    every_id = torch.arange(universe)
    tables = zip(indexed.hash_indexes.values(), table_weights(indexed), table_weights(adopted), strict=True)
    for index, ours, theirs in tables:
        check_close("step", theirs[every_id], ours[index.find(mix64(every_id))])
    facts["optimizer"] = OPTIMIZER.name
    yield from compare_all(f"hashed/train_step/{case}", contestants, setup, facts)
