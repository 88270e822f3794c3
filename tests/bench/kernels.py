"""Kernels of the C++ library alone, one benchmark each: against FBGEMM's operators, torch's, and their references."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from recfx.kernels.build import library
from recfx.kernels.lookup.bag_offsets import bag_offsets as check_bags
from recfx.kernels.lookup.bag_offsets import bag_offsets_reference
from recfx.kernels.route.bucketize import Routes
from recfx.kernels.route.bucketize import bucketize as route
from tests.bench.harness import Contestant, Result, compare_all, must_agree
from tests.bench.setup import Ids, Setup
from tests.kernels.routes import by_reference

PIECES = 4
_WARNING = 1  # fbgemm_gpu's BoundsCheckMode

Calls = dict[str, Callable[[int], object]]
"""What each contestant calls with the number of an iteration; ours is the first."""


def _race(name: str, setup: Setup, calls: Calls, **facts: Any) -> Iterator[Result]:
    """All agree on the last batch, and take turns."""
    assert library.load(), library.why_not()
    contestants = [Contestant(who, call) for who, call in calls.items()]
    with torch.no_grad():
        must_agree(contestants)
        yield from compare_all(name, contestants, setup, {**setup.facts("uniform"), **facts})


def _lengths(setup: Setup) -> torch.Tensor:
    return torch.full((setup.tables * setup.batch,), setup.bag_length, dtype=torch.int64)


def bag_offsets(setup: Setup) -> Iterator[Result]:
    """A batch's lengths and ids checked and its bags' offsets computed; ids are all in range."""
    values, lengths = Ids(setup, "uniform").values, _lengths(setup)
    rows = torch.full((setup.tables,), setup.rows, dtype=torch.int64)
    warnings = torch.zeros(1, dtype=torch.int64)

    def fbgemm(i: int) -> torch.Tensor:
        offsets: torch.Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        torch.ops.fbgemm.bounds_check_indices(rows, values[i], offsets, _WARNING, warnings)
        return offsets

    calls: Calls = {
        "bag_offsets": lambda i: check_bags(values[i], lengths, False, [setup.batch], rows)[0],
        "FBGEMM cumsum + bounds check": fbgemm,
        "its reference": lambda i: bag_offsets_reference(values[i], lengths, False, [setup.batch], rows)[0],
    }
    yield from _race("bag_offsets/uniform", setup, calls)


def bucketize(setup: Setup) -> Iterator[Result]:
    """Ids routed to four pieces of every table; tables without an index are cut evenly, as FBGEMM's do."""
    values, lengths, tables = Ids(setup, "uniform").values, _lengths(setup), setup.tables
    block = -(-setup.rows // PIECES)
    borders = [min(piece * block, setup.rows) for piece in range(PIECES + 1)]
    nothing, sources = [0] * tables, [*range(tables)] * PIECES
    pieces = [piece for piece in range(PIECES) for _ in range(tables)]
    routes = Routes([borders] * tables, nothing, [setup.rows] * tables, nothing, nothing, sources, pieces)
    blocks = torch.full((tables,), block, dtype=torch.int64)

    def fbgemm(i: int) -> torch.Tensor:
        arguments = (lengths, values[i], False, False, blocks, PIECES, None)
        return torch.ops.fbgemm.block_bucketize_sparse_features(*arguments)[1]

    calls: Calls = {
        "bucketize": lambda i: route(values[i], lengths, setup.batch, routes)[0],
        "FBGEMM block_bucketize": fbgemm,
        "its reference": lambda i: by_reference(values[i], lengths, setup.batch, routes)[0],
    }
    yield from _race("bucketize/uniform", setup, calls, pieces=PIECES)
