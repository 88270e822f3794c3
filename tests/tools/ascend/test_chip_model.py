"""The model of a chip: which part binds, what each assumption does, and what it refuses. Nothing is timed."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from recfx.kernels.build.tiling import ASCEND_910B, CHIPS
from tests.tools.ascend.chip_model import ASSUMPTIONS, KIND, MIDDLE, SOURCES, Assumptions, modelled, parts_of
from tests.tools.ascend.per_row import RowWork

POOLED = "recfx_pooled_lookup"
NOTHING = replace(MIDDLE, **{field.name: 0.0 for field in fields(Assumptions) if field.name != "name"})
FREE = replace(NOTHING, core_bandwidth=float("inf"), memory_bandwidth=float("inf"))


def test_each_assumption_has_a_source() -> None:
    assert set(SOURCES) == {field.name for field in fields(Assumptions)} - {"name"}
    assert all(value > 0 for assumed in ASSUMPTIONS for name, value in vars(assumed).items() if name != "name")


def test_sets_go_from_kind_to_harsh() -> None:
    times = [modelled(POOLED, 10**5, 10**4, 64, 4, ASCEND_910B, assumed).seconds for assumed in ASSUMPTIONS]
    assert times == sorted(times)
    assert times[-1] > 2 * times[0]


@pytest.mark.parametrize(
    ("assumed", "expected"),
    [
        ({"copy": 7.0}, {"latency": 14.0}),
        ({"wait": 1.0}, {"latency": 8.0}),
        ({"vector": 1.0}, {"latency": 7.0}),
        ({"copy_issue": 1.0}, {"copies": 16.0, "latency": 3.0}),
        ({"core_bandwidth": 512.0}, {"copies": 8.0, "latency": 2 * 0.4 + 3 * 0.4}),
        ({"operation": 1.0}, {"scalars": 30 + 16 + 4 + 5 + 6.0}),
        ({"division": 2.0}, {"scalars": 8.0}),
        ({"load": 1.0}, {"scalars": 9.0}),
        ({"line": 1.0}, {"scalars": 2.0}),
        ({"piece": 1.0}, {"vectors": 5 * 4.0, "latency": 7 * 4.0}),
    ],
)
def test_what_each_assumption_does(assumed: dict[str, float], expected: dict[str, float]) -> None:
    work = RowWork(16, 4, 4096, 30, 4, 9, 2, 5, 6, 0, 2, 3, 7, 8)
    parts = parts_of(work, work.bytes, 256, replace(FREE, **assumed))
    assert {name: value for name, value in parts.items() if value} == pytest.approx(expected)


@pytest.mark.parametrize("stops", [1, 2, 3])
def test_a_scalar_unit_that_stops_works_before_and_after_the_copies(stops: int) -> None:
    """And while the others come, if it stops for fewer than follow one another."""
    work = RowWork(operations=30, series=2, stops=stops, waited=2)
    parts = parts_of(work, 0.0, 64, replace(FREE, operation=1.0, copy=10.0, wait=3.0))
    assert parts["latency"] == min(stops, 2) * 10 + 2 * 3 + 30
    faster = parts_of(work, 0.0, 64, replace(FREE, copy=10.0, wait=3.0))
    assert faster["latency"] == 2 * 10 + 2 * 3


def test_more_cores_take_less_time() -> None:
    more, fewer = (
        modelled(POOLED, 10**6, 10**5, 64, 4, CHIPS[name], MIDDLE) for name in ("Ascend910B1", "Ascend910B4")
    )
    assert (fewer.seconds - MIDDLE.launch) / (more.seconds - MIDDLE.launch) == pytest.approx(48 / 40)


def test_what_binds_is_named() -> None:
    """Copies that take no time leave the memory, or the scalars; nothing else leaves the launch."""
    slow_memory = replace(FREE, memory_bandwidth=1e6)
    time = modelled(POOLED, 1000, 100, 64, 4, ASCEND_910B, slow_memory)
    assert (time.binds, time.share) == ("memory", 1.0)
    assert time.seconds == pytest.approx((1000 + 100) * 256 / 1e6)
    assert modelled(POOLED, 1000, 100, 64, 4, ASCEND_910B, replace(FREE, line=1.0)).binds == "scalars"
    assert modelled(POOLED, 0, 0, 64, 4, ASCEND_910B, KIND).seconds == KIND.launch


def test_the_slower_compiler_counts_unless_one_is_named() -> None:
    def seconds(compiler: str) -> float:
        return modelled(POOLED, 10**5, 10**4, 64, 4, ASCEND_910B, MIDDLE, compiler=compiler).seconds

    assert seconds("") == max(seconds("1.0.0"), seconds("1.2.0"))


def test_forms_are_chosen_by_what_is_asked() -> None:
    def seconds(kernel: str, dim: int, element_bytes: float, rule: str = "", weighted: bool = False) -> float:
        return modelled(kernel, 10**5, 10**4, dim, element_bytes, ASCEND_910B, KIND, rule, weighted).seconds

    assert seconds(POOLED, 64, 4, weighted=True) >= seconds(POOLED, 64, 4)
    assert seconds(POOLED, 1024, 4) > seconds(POOLED, 64, 4)
    assert seconds("recfx_fused_step", 64, 4, "adagrad") > seconds("recfx_fused_step", 64, 4, "sgd")
    assert seconds("recfx_quantized_lookup", 64, 0.5) != seconds("recfx_quantized_lookup", 64, 1)
    with pytest.raises(ValueError, match=r"recfx_pooled_lookup is known for elements of 2, 4 bytes, not 1"):
        seconds(POOLED, 64, 1)
    with pytest.raises(ValueError, match=r"recfx_unheard_of is known for elements of no bytes"):
        seconds("recfx_unheard_of", 64, 4)
