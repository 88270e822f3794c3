"""``pooled_lookup``: the forward of all tables in one call, without autograd, against FBGEMM's forward and torch's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from recfx.kernels.build import library
from recfx.kernels.lookup.pooled_lookup import pooled_lookup
from tests.bench.harness import Contestant, Result, compare_all, must_agree
from tests.bench.setup import DISTRIBUTIONS, Ids, Setup, embedding_bags
from tests.bench.workload import OPTIMIZERS, standard_collection, table_batched, table_weights

OURS, FBGEMM, TORCH = "pooled_lookup", "FBGEMM table-batched", "F.embedding_bag a table"


def run(setup: Setup) -> Iterator[Result]:
    """SUM, float32; rows are in range."""
    assert library.load(), library.why_not()
    for distribution in DISTRIBUTIONS:
        ids = Ids(setup, distribution)
        collection = standard_collection(setup)
        weights = [weight.detach() for weight in table_weights(collection)]
        peer = table_batched(setup, collection, OPTIMIZERS[0])
        tables = list(range(setup.tables))

        def ours(i: int, ids: Ids = ids, weights: list[torch.Tensor] = weights, tables: list[int] = tables) -> object:
            return pooled_lookup(ids.values[i], ids.offsets, weights, tables)[0]

        def one_by_one(i: int, ids: Ids = ids, weights: list[torch.Tensor] = weights) -> object:
            rows = ids.values[i].split(setup.batch * setup.bag_length)
            return torch.cat(embedding_bags(rows, weights, ids.offsets[: setup.batch + 1]), dim=1)

        contestants = [
            Contestant(OURS, ours),
            Contestant(FBGEMM, lambda i, ids=ids, peer=peer: peer(ids.values[i], ids.offsets)),  # type: ignore[misc]
            Contestant(TORCH, one_by_one),
        ]
        with torch.no_grad():
            must_agree(contestants)
            name = f"pooled_lookup/{setup.case(distribution)}"
            yield from compare_all(name, contestants, setup, setup.facts(distribution))
