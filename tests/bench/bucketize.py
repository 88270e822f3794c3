"""``bucketize``: ids routed to four pieces of every table, against FBGEMM's ``block_bucketize_sparse_features``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from recfx.kernels.build import library
from recfx.kernels.route.bucketize import Routes, bucketize
from tests.bench.harness import Contestant, Result, compare_all, must_agree
from tests.bench.setup import Ids, Setup
from tests.kernels.routes import by_reference

OURS, REFERENCE, FBGEMM = "bucketize", "its reference", "FBGEMM block_bucketize"
PIECES = 4


def run(setup: Setup) -> Iterator[Result]:
    """Tables without an index, cut evenly: both can do this, with the same resulting ids."""
    assert library.load(), library.why_not()
    ids = Ids(setup, "uniform")
    lengths = torch.full((setup.tables * setup.batch,), setup.bag_length, dtype=torch.int64)
    block = -(-setup.rows // PIECES)
    borders = [min(piece * block, setup.rows) for piece in range(PIECES + 1)]
    features = range(setup.tables)
    routes = Routes(
        row_borders=[borders] * setup.tables,
        dense_rows=[0] * setup.tables,
        rows=[setup.rows] * setup.tables,
        buckets=[0] * setup.tables,
        seeds=[0] * setup.tables,
        sources=[feature for _ in range(PIECES) for feature in features],
        pieces=[piece for piece in range(PIECES) for _ in features],
    )
    blocks = torch.full((setup.tables,), block, dtype=torch.int64)

    def fbgemm(i: int) -> torch.Tensor:
        _, routed, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths, ids.values[i], False, False, blocks, PIECES, None
        )
        return routed

    contestants = [
        Contestant(OURS, lambda i: bucketize(ids.values[i], lengths, setup.batch, routes)[0]),
        Contestant(FBGEMM, fbgemm),
        Contestant(REFERENCE, lambda i: by_reference(ids.values[i], lengths, setup.batch, routes)[0]),
    ]
    must_agree(contestants)
    yield from compare_all("bucketize/uniform", contestants, setup, {**setup.facts("uniform"), "pieces": PIECES})
