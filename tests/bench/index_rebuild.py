"""``index_rebuild``: an index rebuilt from its saved state, against inserting its ids one batch after another."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.build import library
from recfx.kernels.index.index_rebuild import NO_PROBLEM, rebuild
from recfx.kernels.index.mix64 import mix64
from tests.bench.harness import Contestant, Result, compare, take_turns
from tests.bench.setup import Setup

OURS, PEER = "rebuild", "HashIndex.find_or_insert"
PIECE = 2**16


def run(setup: Setup) -> Iterator[Result]:
    """For the smallest of ``hash_index``'s sizes."""
    assert library.load(), library.why_not()
    size = setup.index_sizes[0]
    ids = mix64(torch.arange(size))
    pieces = ids.split(PIECE)
    index = _filled(2 * size, pieces)

    def again(_: int) -> None:
        assert rebuild(index.index_buffers(), index.policy).problem == NO_PROBLEM

    contestants = [Contestant(OURS, again), Contestant(PEER, lambda _: _filled(2 * size, pieces))]
    rows = index.find(ids)
    again(-1)
    torch.testing.assert_close(index.find(ids), rows)
    times = take_turns(contestants, max(1, setup.iterations // 4), 1)
    facts = {
        "tables": 1, "rows": 2 * size, "dim": 0, "batch": PIECE, "bag_length": 1, "ids": "all different",
        "threads": setup.threads, "ids_in_index": size,
    }  # fmt: skip
    yield compare("index_rebuild/half_full", times, OURS, PEER, facts)


def _filled(rows: int, pieces: tuple[torch.Tensor, ...]) -> HashIndex:
    index = HashIndex(rows, config=HashConfig())
    for piece in pieces:
        index.find_or_insert(piece)
    return index
