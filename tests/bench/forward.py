"""``forward``: an adopted conversion against the standard collection and FBGEMM's module, without gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import recfx
from recfx.collection import HashEmbeddingBagCollection
from tests.bench.harness import Contestant, Result, compare, take_turns
from tests.bench.workload import (
    DISTRIBUTIONS,
    OPTIMIZERS,
    Ids,
    Setup,
    check_close,
    standard_collection,
    table_batched,
)

OURS, OUR_LOOKUP = "converted collection", "its lookup node alone"
STANDARD, TABLE_BATCHED = "EmbeddingBagCollection", "FBGEMM table-batched"


def run(setup: Setup) -> Iterator[Result]:
    """Ours from a KJT with lengths; FBGEMM's module gets indices and offsets, as does our lookup node alone."""
    collection = standard_collection(setup)
    converted = recfx.convert(collection, verify=False)
    assert isinstance(converted, HashEmbeddingBagCollection)
    peer = table_batched(setup, collection, OPTIMIZERS[0])
    for distribution in DISTRIBUTIONS:
        ids = Ids(setup, distribution)
        ours, standard, checked = ids.batches(), ids.batches(), ids.batches()
        for batch in checked:
            batch.offsets()  # computed before: the lookup node reads offsets, as the table-batched module does
        lookup = converted.graph_module.lookup
        contestants = [
            Contestant(OURS, lambda i, batches=ours: converted(batches[i]).values()),
            Contestant(OUR_LOOKUP, lambda i, batches=checked, lookup=lookup: lookup(batches[i])),
            Contestant(STANDARD, lambda i, batches=standard: collection(batches[i]).values()),
            Contestant(TABLE_BATCHED, lambda i, ids=ids: peer(ids.values[i], ids.offsets)),
        ]
        with torch.no_grad():
            expected = contestants[0].run(-1)
            for contestant in contestants[1:]:
                check_close(contestant.name, contestant.run(-1), expected)
            times = take_turns(contestants, setup.iterations, setup.warm_up)
        name, facts = f"forward/{distribution.replace(' ', '_')}", setup.facts(distribution)
        yield compare(name, times, OURS, TABLE_BATCHED, facts)
        yield compare(name, times, OUR_LOOKUP, TABLE_BATCHED, facts)
        yield compare(name, times, OURS, STANDARD, facts)
