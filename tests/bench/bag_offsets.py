"""``bag_offsets``: a batch's lengths and ids checked and its bags' offsets computed, against FBGEMM's two operators."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from recfx.kernels.build import library
from recfx.kernels.lookup.bag_offsets import bag_offsets, bag_offsets_reference
from tests.bench.harness import Contestant, Result, compare_all, must_agree
from tests.bench.setup import Ids, Setup

OURS, REFERENCE, FBGEMM = "bag_offsets", "its reference", "FBGEMM cumsum + bounds check"
_WARNING = 1  # fbgemm_gpu's BoundsCheckMode


def run(setup: Setup) -> Iterator[Result]:
    """From lengths to checked offsets; ids are all in range."""
    assert library.load(), library.why_not()
    ids = Ids(setup, "uniform")
    lengths = torch.full((setup.tables * setup.batch,), setup.bag_length, dtype=torch.int64)
    rows = torch.full((setup.tables,), setup.rows, dtype=torch.int64)
    warnings = torch.zeros(1, dtype=torch.int64)

    def fbgemm(i: int) -> torch.Tensor:
        offsets: torch.Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        torch.ops.fbgemm.bounds_check_indices(rows, ids.values[i], offsets, _WARNING, warnings)
        return offsets

    contestants = [
        Contestant(OURS, lambda i: bag_offsets(ids.values[i], lengths, False, [setup.batch], rows)[0]),
        Contestant(FBGEMM, fbgemm),
        Contestant(REFERENCE, lambda i: bag_offsets_reference(ids.values[i], lengths, False, [setup.batch], rows)[0]),
    ]
    must_agree(contestants)
    yield from compare_all("bag_offsets/uniform", contestants, setup, setup.facts("uniform"))
