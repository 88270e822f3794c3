import re
from pathlib import Path

import pytest
import torch

from recfx.kernels.build import huge_pages
from recfx.kernels.build.huge_pages import LEAST_BYTES, advise_huge_pages
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules.adagrad import ADAGRAD

MAPS = Path("/proc/self/smaps")
needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists() or not MAPS.exists(),
    reason="this system has no transparent huge pages",
)


def of_mapping(address: int, name: str) -> list[str]:
    """What the mapping that holds the address has under this name."""
    inside = False
    for line in MAPS.read_text().splitlines():
        if borders := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(borders[1], 16) <= address < int(borders[2], 16)
        elif inside and line.startswith(f"{name}:"):
            return line.split()[1:]
    return []


def is_advised(address: int) -> bool:
    return "hg" in of_mapping(address, "VmFlags")


def huge_bytes(address: int) -> int:
    return int(of_mapping(address, "AnonHugePages")[0]) * 1024


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


@needs_huge_pages
@pytest.mark.parametrize("huge_page", [2 << 20, 16 << 20])
def test_a_tensor_with_content_is_moved_piece_by_piece(
    huge_page: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never")
    (tmp_path / "hpage_pmd_size").write_text(f"{huge_page}\n")
    monkeypatch.setattr(huge_pages, "_ENABLED", tmp_path / "enabled")
    monkeypatch.setattr(huge_pages, "_spent", 0.0)
    monkeypatch.setattr(huge_pages, "_AT_ONCE", 8 << 20)
    tensor, pieces, moved = torch.arange(40 << 17), [], []  # 40 MiB: from the system, not from a heap
    address, before = tensor.data_ptr(), huge_bytes(tensor.data_ptr())
    collapse = torch.ops.recfx.collapse_pages

    def recorded(given: torch.Tensor, first_byte: int, last_byte: int) -> bool:
        pieces.append((first_byte, last_byte))
        moved.append(collapse(given, first_byte, last_byte))
        return True  # where the system is older, or memory is short at this moment: move_to_huge_pages would stop

    monkeypatch.setattr(torch.ops.recfx, "collapse_pages", recorded)
    huge_pages.move_to_huge_pages([tensor, torch.empty(3), tensor.view(2, -1).t()])
    assert [first for first, _ in pieces] == [0, *(last for _, last in pieces[:-1])]
    assert pieces[-1][1] == tensor.nbytes
    assert len(pieces) >= (40 << 20) // max(8 << 20, 2 * huge_page)
    assert all(last - first >= huge_page for first, last in pieces[:-1])
    assert all((address + last) % huge_page == 0 for _, last in pieces[:-1])
    assert huge_pages._spent > 0
    assert is_advised(address + tensor.nbytes // 2)
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, torch.arange(40 << 17))
    if all(moved):
        assert huge_bytes(address + tensor.nbytes // 2) >= max(before, 36 << 20)


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (2, 1), (0, 10**9)])
def test_pages_of_other_data_are_never_moved(first: int, last: int) -> None:
    with pytest.raises(RuntimeError, match="are not in a tensor of"):
        torch.ops.recfx.collapse_pages(torch.empty(4), first, last)


@needs_huge_pages
def test_the_state_of_a_big_table_is_advised() -> None:
    weight = torch.empty(LEAST_BYTES, 2)
    optimizer = FusedOptimizer(ADAGRAD, {"lr": 0.1, "eps": 1e-8, "initial_accumulator_value": 0.5})
    optimizer.prepare(weight)
    state = optimizer.state["sum"]
    assert is_advised(state.data_ptr() + state.nbytes // 2)
    assert (state.dtype, float(state.min()), float(state.max())) == (torch.float32, 0.5, 0.5)
