"""A frozen slot table is served by FBGEMM's own operator."""

from __future__ import annotations

from typing import Any

import fbgemm_gpu  # noqa: F401
import pytest
import torch

from recfx.hashing import HashConfig, HashIndex


def serve(index: HashIndex, ids: torch.Tensor) -> torch.Tensor:
    """What an exported model does: dense ids, id -1 and misses are `torch.where`s around the stock operator."""
    slots, side_row = index.slot_table()
    offsets, tables = torch.tensor([0, ids.numel()]), torch.tensor([0, slots.size(0)])
    rows = torch.ops.fbgemm.pruned_hashmap_lookup(ids, offsets, slots, tables)
    rows = torch.where(ids == -1, side_row, rows)
    dense_rows = index.config.dense_rows
    rows = torch.where((ids >= 0) & (ids < dense_rows), ids, rows)
    shared = index.shared_rows(ids) if index.config.unseen == "share" else torch.full_like(ids, -1)
    return torch.where(rows < 0, shared, rows)


@pytest.mark.parametrize(
    "config",
    [
        {"on_full": "share"},
        {"on_full": "evict", "evict": "lru", "dense_rows": 50, "buckets": 4},
        {"on_full": "evict", "evict": "lfu", "unseen": "share"},
        {"on_full": "evict", "admit_after": 2, "dense_rows": 1},
    ],
)
def test_fbgemm_finds_what_the_index_finds(config: dict[str, Any]) -> None:
    index = HashIndex(500, config=HashConfig(**config))
    universe = torch.cat([torch.randint(-(2**63), 2**63 - 1, (1500,)), torch.arange(-30, 100)])
    for step in range(12):
        batch = universe[torch.randint(0, universe.numel(), (400,))]
        index.insert(batch)
        index.erase(universe[torch.randint(0, universe.numel(), (100,))])
        if step % 4 == 3:
            loaded = HashIndex(500, config=HashConfig(**config))
            loaded.load_state_dict(index.state_dict())
            index = loaded
        assert torch.equal(serve(index, universe), index.answer(universe)), step
        assert torch.equal(serve(index, universe + 1), index.answer(universe + 1)), step
    assert index.counters["evicted"] > 0 or config["on_full"] == "share"
    index.insert(torch.tensor([-1, -1, -1]))
    assert serve(index, torch.tensor([-1])).item() == index.find(torch.tensor([-1])).item() >= 0
