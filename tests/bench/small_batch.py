"""``small_batch``: training steps on 64 samples, where fixed costs decide, for few tables and for many.

Converted collections that are not sharded, static and hashed, against TorchRec's DistributedModelParallel on one
process, whose tables are FBGEMM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

import recfx
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.kernels.index.mix64 import mix64
from tests.bench.harness import Contestant, Result, compare_all
from tests.bench.own_process import on_ranks
from tests.bench.setup import SMALL_BATCH, Ids, Setup
from tests.bench.sharded import OPTIMIZER, TORCHREC, model_of
from tests.bench.workload import attach, check_close, standard_collection, with_optimizer

STATIC, HASHED = "recfx, static", "recfx, hashed"
TABLES = (26, 200)
BAG_LENGTH = 3


def run(setup: Setup) -> Iterator[Result]:
    """Forward, backward and the fused row-wise Adagrad."""
    for tables in TABLES:
        many = min(tables, setup.tables * tables // TABLES[0])
        sizes = replace(setup, tables=many, rows=min(setup.rows, 10_000), batch=min(setup.batch, SMALL_BATCH))
        sizes = replace(sizes, bag_length=BAG_LENGTH, iterations=4 * setup.iterations)
        yield from on_ranks(1, _measure, sizes)  # DistributedModelParallel needs a process group


def _measure(setup: Setup) -> list[Result]:
    dense, raw = Ids(setup, "uniform"), Ids(setup, "uniform", raw=mix64)
    gradient = torch.rand(setup.batch, setup.tables * setup.dim)
    torch.manual_seed(0)
    static = recfx.convert(with_optimizer(standard_collection(setup), OPTIMIZER), verify=False)
    hashing = recfx.HashConfig(dense_rows=0, rows=2 * setup.rows)
    hashed = recfx.convert(standard_collection(setup), hashing=hashing, verify=False)
    assert isinstance(hashed, HashEmbeddingBagCollection)
    attach(hashed, OPTIMIZER)
    for table in hashed.tables:
        hashed.index(table.name).insert(mix64(torch.arange(setup.rows)))
    models = {TORCHREC: model_of(TORCHREC, setup, "table_wise", 1, setup.rows), STATIC: static, HASHED: hashed}
    contestants = []
    for name, model in models.items():
        batches = (raw if name == HASHED else dense).batches()
        contestants.append(
            Contestant(name, lambda i, model=model, batches=batches: model(batches[i]).values().backward(gradient))
        )
    with torch.no_grad():
        ours, theirs = (models[name](dense.batches()[-1]).to_dict() for name in (STATIC, TORCHREC))
    for key, pooled in ours.items():
        check_close(key, theirs[key], pooled)
    facts = {**setup.facts("uniform"), "optimizer": OPTIMIZER.name}
    pairs = [(STATIC, TORCHREC), (HASHED, TORCHREC)]
    return list(compare_all(f"small_batch/{setup.tables}", contestants, setup, facts, pairs))
