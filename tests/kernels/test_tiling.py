"""Grids, blocks and the unified buffer; ``tests/ascend`` compares the figures with Ascend's compiler."""

import pytest

from recfx.kernels.build import tiling
from recfx.kernels.build.tiling import (
    ASCEND_910B,
    CHIPS,
    Need,
    block_of,
    chip_named,
    lookup_rows,
    programs,
    refusal,
    step_rows,
)
from recfx.optim.fused_step_op import rules_in_triton

_STEPS = ("recfx_fused_step", "recfx_fused_step_of_borders")


@pytest.mark.parametrize(
    ("dim", "block"), [(1, 16), (15, 16), (16, 16), (17, 32), (64, 64), (65, 128), (1000, 1024), (1025, 2048)]
)
def test_blocks(dim: int, block: int) -> None:
    assert block_of(dim) == block


@pytest.mark.parametrize(
    ("block", "step", "lookup"), [(16, 8, 32), (256, 8, 32), (512, 4, 16), (1024, 2, 8), (4096, 2, 8)]
)
def test_fewer_rows_are_asked_for_where_they_are_wide(block: int, step: int, lookup: int) -> None:
    assert step_rows(block) == step_rows(block, ASCEND_910B) == step
    assert step_rows(block, chip_named("Ascend910_9579")) == 2
    assert (lookup_rows(block, ASCEND_910B), lookup_rows(block)) == (lookup, 8)
    assert Need(5, 10, 3, 7).of(block) == 5 + (10 + 3 * step + 7 * min(step, 4)) * block
    assert Need(5, 10, per_lookup_row=3).of(block) == 5 + (10 + 3 * lookup) * block


@pytest.mark.parametrize(("work", "expected"), [(0, 1), (1, 1), (39, 39), (40, 40), (41, 40), (10**9, 40)])
def test_programs(work: int, expected: int) -> None:
    assert programs(ASCEND_910B, work) == expected


def test_chips_are_found_by_their_names() -> None:
    assert chip_named("Ascend910B3") is ASCEND_910B
    assert all(chip_named(name).name == name for name in CHIPS)


def test_a_chip_without_a_table_and_how_to_add_one() -> None:
    with pytest.raises(ValueError, match=r"no tiling table for chip 'Ascend930'.*CHIPS.*Ascend930\.ini.*ub_size"):
        chip_named("Ascend930")
    with pytest.raises(ValueError, match="compilers for Triton have no target for chip 'Ascend310P3'"):
        chip_named("Ascend310P3")


KERNELS = [(kernel, size, None) for kernel, of_sizes in tiling.NEEDS.items() for size in of_sizes]
STEPS = [(kernel, size, rule.needs) for kernel in _STEPS for size in (2, 4) for rule in rules_in_triton()]


def test_kernels_serve_every_dim_up_to_1024_on_every_chip() -> None:
    for chip in CHIPS.values():
        assert [refusal(chip, kernel, 1024, size, rule) for kernel, size, rule in KERNELS + STEPS] == (
            [None] * len(KERNELS + STEPS)
        )
