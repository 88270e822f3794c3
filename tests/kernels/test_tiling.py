"""Grids, blocks and the unified buffer; ``tests/ascend`` compares the figures with Ascend's compiler."""

from __future__ import annotations

import pytest

from recfx.kernels.build import tiling
from recfx.kernels.build.tiling import (
    ASCEND_910B,
    CHIPS,
    Need,
    RuleNeeds,
    block_of,
    chip_named,
    lookup_rows,
    programs,
    refusal,
    step_rows,
    ub_bytes,
)
from recfx.optim.fused_step_op import rules_in_triton

_STEPS = ("recfx_fused_step", "recfx_fused_step_of_borders")
RULE = RuleNeeds("of_a_test", step=Need(10, 40), step_of_borders=Need(20, 30))


@pytest.mark.parametrize(
    ("dim", "block"), [(1, 16), (15, 16), (16, 16), (17, 32), (64, 64), (65, 128), (1000, 1024), (1025, 2048)]
)
def test_blocks(dim: int, block: int) -> None:
    assert block_of(dim) == block


def test_the_smallest_block_of_halves_fills_the_alignment() -> None:
    assert {2 * tiling.SMALLEST_BLOCK} == {chip.ub_alignment_bytes for chip in CHIPS.values()}


@pytest.mark.parametrize("dim", [0, -1])
def test_rows_without_columns_have_no_block(dim: int) -> None:
    with pytest.raises(ValueError, match=f"a row has at least one column, not {dim}"):
        block_of(dim)


@pytest.mark.parametrize(("block", "rows"), [(16, 8), (256, 8), (512, 4), (1024, 2), (4096, 2)])
def test_a_step_asks_for_fewer_rows_where_they_are_wide(block: int, rows: int) -> None:
    assert step_rows(block) == step_rows(block, ASCEND_910B) == rows
    assert step_rows(block, chip_named("Ascend910_9579")) == 2
    assert Need(5, 10, 3, 7).of(block) == 5 + (10 + 3 * rows + 7 * min(rows, 4)) * block


@pytest.mark.parametrize(("block", "rows"), [(16, 32), (256, 32), (512, 16), (1024, 8), (4096, 8)])
def test_a_lookup_asks_for_fewer_rows_where_they_are_wide(block: int, rows: int) -> None:
    assert lookup_rows(block, ASCEND_910B) == rows
    assert lookup_rows(block) == 8
    assert Need(5, 10, per_lookup_row=3).of(block) == 5 + (10 + 3 * rows) * block


@pytest.mark.parametrize(("work", "expected"), [(0, 1), (1, 1), (39, 39), (40, 40), (41, 40), (10**9, 40)])
def test_programs(work: int, expected: int) -> None:
    assert programs(ASCEND_910B, work) == expected


def test_programs_of_every_chip_can_be_launched() -> None:
    for chip in CHIPS.values():
        assert programs(chip, 10**9) == chip.vector_cores <= chip.most_programs


def test_chips_are_found_by_their_names() -> None:
    assert chip_named("Ascend910B3") is ASCEND_910B
    assert all(chip_named(name).name == name for name in CHIPS)


def test_a_chip_without_a_table_and_how_to_add_one() -> None:
    with pytest.raises(ValueError, match=r"no tiling table for chip 'Ascend930'.*CHIPS.*Ascend930\.ini.*ub_size"):
        chip_named("Ascend930")
    with pytest.raises(ValueError, match="compilers for Triton have no target for chip 'Ascend310P3'"):
        chip_named("Ascend310P3")


@pytest.mark.parametrize(
    ("name", "cores", "ub_kib"),
    [
        ("Ascend910B4-1", 40, 192),
        ("Ascend910_9382", 48, 192),
        ("Ascend910_9589", 64, 248),
        ("Ascend950DT_95A1", 72, 248),
    ],
)
def test_chips_of_every_generation(name: str, cores: int, ub_kib: int) -> None:
    chip = chip_named(name)
    assert (chip.name, chip.vector_cores, chip.ub_bytes) == (name, cores, ub_kib * 1024)


KERNELS = [(kernel, size, None) for kernel, of_sizes in tiling.NEEDS.items() for size in of_sizes]
STEPS = [(kernel, size, rule.needs) for kernel in _STEPS for size in (2, 4) for rule in rules_in_triton()]


def test_every_rule_has_needs() -> None:
    assert [rule.name for rule in rules_in_triton() if rule.needs is None or rule.needs.rule != rule.name] == []


def test_kernels_serve_every_dim_up_to_1024_on_every_chip() -> None:
    for chip in CHIPS.values():
        assert [refusal(chip, kernel, 1024, size, rule) for kernel, size, rule in KERNELS + STEPS] == (
            [None] * len(KERNELS + STEPS)
        )


def test_a_refusal_has_the_figures() -> None:
    assert refusal(ASCEND_910B, "recfx_fused_step", 8192, 4, RULE) == (
        "recfx_fused_step with rule of_a_test needs 327,690 bytes of the unified buffer for rows of 8,192 columns, "
        "Ascend910B3 has 196,608."
    )


def test_a_step_and_its_borders_have_needs_of_their_own() -> None:
    assert ub_bytes("recfx_fused_step", 64, 2, RULE) == 10 + 40 * 64
    assert ub_bytes("recfx_fused_step_of_borders", 64, 2, RULE) == 20 + 30 * 64


def test_kernels_that_were_never_measured() -> None:
    with pytest.raises(ValueError, match="recfx_other needs was never measured"):
        ub_bytes("recfx_other", 64, 4)
    with pytest.raises(ValueError, match="recfx_pooled_lookup with rule of_a_test needs was never measured"):
        ub_bytes("recfx_pooled_lookup", 64, 4, RULE)
    with pytest.raises(ValueError, match="recfx_fused_step needs was never measured"):
        ub_bytes("recfx_fused_step", 64, 4)


def test_elements_that_a_kernel_does_not_serve() -> None:
    with pytest.raises(ValueError, match="recfx_pooled_lookup serves elements of 2 or 4 bytes, not of 8"):
        ub_bytes("recfx_pooled_lookup", 64, 8)


def test_names_of_kernels_are_kept_by_the_device() -> None:
    assert max(map(len, [*tiling.NEEDS, *_STEPS])) <= min(chip.most_kernel_name for chip in CHIPS.values())
