import re
from pathlib import Path

import pytest
import torch

from recfx.hashing import HashIndex
from recfx.kernels.huge_pages import LEAST_BYTES, advise_huge_pages
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules.adagrad import ADAGRAD

MAPS = Path("/proc/self/smaps")
needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists() or not MAPS.exists(),
    reason="this system has no transparent huge pages",
)


def is_advised(address: int) -> bool:
    """Whether the mapping that holds the address carries the flag ``hg``."""
    inside = False
    for line in MAPS.read_text().splitlines():
        if borders := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(borders[1], 16) <= address < int(borders[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


@needs_huge_pages
def test_a_big_tensor_is_advised_and_keeps_its_content() -> None:
    tensor = torch.arange(LEAST_BYTES // 8 + 1000)
    assert advise_huge_pages(tensor)
    assert is_advised(tensor.data_ptr() + tensor.nbytes // 2)
    assert torch.equal(tensor, torch.arange(LEAST_BYTES // 8 + 1000))


def test_small_and_absent_memory_is_left_alone() -> None:
    assert not advise_huge_pages(torch.empty(LEAST_BYTES - 1, dtype=torch.uint8))
    assert not advise_huge_pages(torch.empty(0))
    assert not advise_huge_pages(torch.empty(LEAST_BYTES, device="meta"))


def test_only_contiguous_memory() -> None:
    with pytest.raises(RuntimeError, match="contiguous"):
        advise_huge_pages(torch.empty(2, LEAST_BYTES, dtype=torch.uint8)[:, ::2])


@needs_huge_pages
def test_the_slot_table_of_a_big_index_is_advised() -> None:
    slots, _ = HashIndex(600_000).slot_table()
    assert is_advised(slots.data_ptr() + slots.nbytes // 2)


@needs_huge_pages
def test_the_state_of_a_big_table_is_advised() -> None:
    weight = torch.empty(LEAST_BYTES, 2)
    optimizer = FusedOptimizer(ADAGRAD, {"lr": 0.1, "eps": 1e-8, "initial_accumulator_value": 0.5})
    optimizer.prepare(weight)
    state = optimizer.state["sum"]
    assert is_advised(state.data_ptr() + state.nbytes // 2)
    assert (state.dtype, float(state.min()), float(state.max())) == (torch.float32, 0.5, 0.5)
