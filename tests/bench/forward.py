"""``forward``: an adopted conversion against the standard collection and FBGEMM's module, without gradients."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

import recfx
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from tests.bench.harness import Contestant, Result, compare_all, must_agree
from tests.bench.setup import DISTRIBUTIONS, Ids, Setup
from tests.bench.workload import OPTIMIZERS, standard_collection, table_batched

OURS, OUR_LOOKUP = "converted collection", "its lookup node alone"
STANDARD, TABLE_BATCHED = "EmbeddingBagCollection", "FBGEMM table-batched"


def run(setup: Setup) -> Iterator[Result]:
    """Ours starts from a KJT with lengths; FBGEMM's module and our lookup node alone get indices and offsets."""
    for distribution in DISTRIBUTIONS:
        yield from _run(setup, distribution)
    for variant in setup.variants()[1:]:
        yield from _run(variant, DISTRIBUTIONS[0])
    gc.collect()  # graphs are full of cycles, and the next table is the largest
    yield from _run(setup.of_one_table(setup.huge_table_rows), DISTRIBUTIONS[0], "huge_table/")


def _run(setup: Setup, distribution: str, case: str = "") -> Iterator[Result]:
    collection = standard_collection(setup)
    converted = recfx.convert(collection, verify=False)
    assert isinstance(converted, HashEmbeddingBagCollection)
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
    pairs = [(OURS, STANDARD), (OURS, TABLE_BATCHED), (OUR_LOOKUP, TABLE_BATCHED)]
    with torch.no_grad():
        must_agree(contestants)
        name = f"forward/{case}{setup.case(distribution)}"
        yield from compare_all(name, contestants, setup, setup.facts(distribution), pairs)
