"""``sequence``: rows that are not pooled, against the standard collection and FBGEMM's module, and from raw ids.

Batches have a quarter of the samples of other benchmarks, and five times as many ids per sample: 512 and 50.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torchrec import JaggedTensor

import recfx
from recfx.hashing import HashConfig
from recfx.kernels.index.mix64 import mix64
from tests.bench.harness import Contestant, Result, compare_all
from tests.bench.own_process import in_own_process
from tests.bench.setup import DISTRIBUTIONS, Ids, Setup
from tests.bench.workload import (
    OPTIMIZERS,
    Optimizer,
    attach,
    check_close,
    fill_with_ids,
    output_gradients,
    standard_collection,
    table_batched,
)

OURS, INDEXED = "converted collection", "the same from raw ids"
STANDARD, TABLE_BATCHED = "EmbeddingCollection", "FBGEMM table-batched, NONE"
TAKEN = 0.75
"""Share of the rows that have an id, and are looked up; if there were more, a bucket might be full."""
PAIRS = [(OURS, STANDARD), (OURS, TABLE_BATCHED), (INDEXED, OURS)]
STANDARD_EVERY = 8
"""The standard collection makes a gradient as large as the table: its step takes far longer than all others."""


def run(setup: Setup) -> Iterator[Result]:
    """All but FBGEMM's module, which gets ids and offsets, start from a KJT, and return a dict of JaggedTensors."""
    setup = replace(setup, batch=setup.batch // 4, bag_length=5 * setup.bag_length, pooling="NONE")
    for distribution in DISTRIBUTIONS:
        yield from in_own_process(_run, setup, distribution, None)
    for optimizer in OPTIMIZERS:
        for distribution in DISTRIBUTIONS:
            yield from in_own_process(_run, setup, distribution, optimizer)


def _run(setup: Setup, distribution: str, optimizer: Optimizer | None) -> Iterator[Result]:
    """The forward in eval mode, without gradients; or, with an optimizer, steps."""
    universe = int(setup.rows * TAKEN)
    dense, raw = Ids(setup, distribution, universe), Ids(setup, distribution, universe, raw=mix64)
    standard = standard_collection(setup)
    peer = table_batched(setup, standard, optimizer or OPTIMIZERS[0])
    copies = [copy.deepcopy(standard) for _ in range(2)]
    for model in (standard, *copies) if optimizer else ():
        attach(model, optimizer)
    ours = recfx.convert(copies[0], verify=False)
    indexed = recfx.convert(copies[1], hashing=HashConfig(dense_rows=0), verify=False)
    fill_with_ids(indexed, ours, universe)
    gradients = output_gradients(setup, 2 if optimizer else 0)
    by_key = [gradient.chunk(setup.tables) for gradient in gradients]

    def finish(i: int, output: dict[str, JaggedTensor] | torch.Tensor) -> object:
        if optimizer is None:
            return output
        if isinstance(output, torch.Tensor):
            return output.backward(gradients[i % 2])
        return torch.autograd.backward([rows.values() for rows in output.values()], by_key[i % 2])

    of_ours, of_standard, of_indexed = dense.batches(), dense.batches(), raw.batches()
    contestants = [
        Contestant(OURS, lambda i: finish(i, ours(of_ours[i]))),
        Contestant(INDEXED, lambda i: finish(i, indexed(of_indexed[i]))),
        Contestant(STANDARD, lambda i: finish(i, standard(of_standard[i])), every=STANDARD_EVERY if optimizer else 1),
        Contestant(TABLE_BATCHED, lambda i: finish(i, peer(dense.values[i], dense.offsets))),
    ]
    facts = {**setup.facts(distribution), "ids_in_index": universe}
    name = f"sequence/forward/{distribution.replace(' ', '_')}"
    if optimizer:
        facts["optimizer"] = optimizer.name
        name = f"sequence/{optimizer.name}/{distribution.replace(' ', '_')}"
        for contestant in contestants:
            contestant.run(-1)
    else:
        for model in (ours, indexed, standard):
            model.eval()
    with torch.no_grad():
        expected = torch.cat([rows.values() for rows in standard(of_standard[-1]).values()])
        for who, output in ((OURS, ours(of_ours[-1])), (INDEXED, indexed(of_indexed[-1]))):
            check_close(who, expected, torch.cat([rows.values() for rows in output.values()]))
        check_close(TABLE_BATCHED, expected, peer(dense.values[-1], dense.offsets))
    del expected
    with torch.set_grad_enabled(optimizer is not None):
        yield from compare_all(name, contestants, setup, facts, PAIRS)
