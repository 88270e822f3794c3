"""``row_initialization``: initial weights written into scattered rows, against torch's generator and a copy."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from recfx.kernels.build import library
from recfx.kernels.index.mix64 import mix64
from recfx.kernels.step.row_initialization import init_rows_reference_, initialization_key, initialize_rows
from tests.bench.harness import Contestant, Result, compare_all
from tests.bench.setup import Setup

OURS, REFERENCE, TORCH = "initialize_rows", "its reference", "torch.rand + index_copy_"


def run(setup: Setup) -> Iterator[Result]:
    """As many new rows as a batch has samples, all in one table."""
    assert library.load(), library.why_not()
    generator = torch.Generator().manual_seed(3)
    count = min(setup.batch, setup.rows)
    iterations = setup.iterations + setup.warm_up + 1
    rows = [torch.randperm(setup.rows, generator=generator)[:count] for _ in range(iterations)]
    ids = [mix64(own) for own in rows]
    key = initialization_key("table", 0)
    weight, other = torch.zeros(setup.rows, setup.dim), torch.zeros(setup.rows, setup.dim)

    contestants = [
        Contestant(OURS, lambda i: initialize_rows(weight, rows[i], ids[i], key, -1.0, 1.0)),
        Contestant(TORCH, lambda i: other.index_copy_(0, rows[i], torch.rand(count, setup.dim))),
        Contestant(REFERENCE, lambda i: init_rows_reference_(other, rows[i], ids[i], key, -1.0, 1.0)),
    ]
    for contestant in contestants:
        contestant.run(-1)
    torch.testing.assert_close(weight, other, rtol=0, atol=0)
    facts = {**setup.facts("uniform"), "tables": 1, "batch": count, "bag_length": 1}
    yield from compare_all("row_initialization/new_rows", contestants, setup, facts)
