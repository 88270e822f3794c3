"""The step in C++ against the rules' own maths on whole gradients, and against itself where bits must be equal."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.kernels.step.fused_step import fused_step_, rules, step_touched_rows
from recfx.optim.rules import RULES
from recfx.optim.rules.rule import StepNumbers
from tests.ascend.guard_pages import guarded, signal_of
from tests.kernels.steps import SETTINGS, Case, case
from tests.kernels.threads import assert_same_on_any_threads

# A gradient is summed in float32 in another order than in the reference; half of a unit in the last place for others.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DIMS = st.sampled_from([1, 3, 4, 7, 15, 16, 17, 20, 33, 64, 100, 128, 130, 200])


def test_the_operator_has_every_rule() -> None:
    names = [rule.name for rule in RULES]
    assert torch.ops.recfx.fused_step_rules() == names
    assert rules() == set(names), "as its sources say"


def check(made: Case) -> None:
    by_reference = made.copy()
    by_reference.step_by_reference()
    fused_step_(*made.arguments())
    for actual, expected in zip(made.tensors(), by_reference.tensors(), strict=True):
        tolerance = TOLERANCE[actual.dtype]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=150)
@given(
    rule=st.sampled_from(list(SETTINGS)),
    dtype=st.sampled_from(list(TOLERANCE)),
    tables=st.lists(st.tuples(st.integers(1, 70), DIMS, st.integers(1, 3)), min_size=1, max_size=3),
    batch_size=st.integers(0, 9),
    longest=st.sampled_from([0, 1, 4, 40]),
    pooling=st.sampled_from(["sum", "mean", "weighted", "none"]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    absent=st.sampled_from([0.0, 0.2, 1.0]),
    unused=st.sets(st.integers(0, 8), max_size=4),
    seed=st.integers(0, 1000),
)
def test_a_step_is_the_rules_own(
    rule: str,
    dtype: torch.dtype,
    tables: list[tuple[int, int, int]],
    batch_size: int,
    longest: int,
    pooling: str,
    weight_decay: float,
    absent: float,
    unused: set[int],
    seed: int,
) -> None:
    rows, dims, features = (tuple(column) for column in zip(*tables, strict=True))
    batch_size = max(batch_size, 1) if pooling == "none" else batch_size
    how = {"mean": pooling == "mean", "weighted": pooling == "weighted", "unpooled": pooling == "none"}
    how |= {"weight_decay": weight_decay, "absent": absent}  # type: ignore[dict-item]
    made = case(rule, dtype, rows, dims, features, batch_size, longest, seed=seed, **how)  # type: ignore[arg-type]
    check(replace(made, unused=tuple(unused) if pooling == "none" else ()))


# Tables of one group, of several bins per group, and of many groups; all positions in one row, in the first rows or in
# the last ones.
@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 4095, 4096, 4097, 200_000])
@pytest.mark.parametrize("where", ["anywhere", "first", "last", "one"])
@pytest.mark.parametrize("unpooled", [False, True])
def test_many_positions(rows: int, where: str, unpooled: bool) -> None:
    made = case("sgd", rows=(rows, 3), dims=(2, 1), features=(2, 1), batch_size=2500, longest=4, unpooled=unpooled)
    last = int(made.offsets[2 if unpooled else 5000])
    if where == "one":
        made.rows[:last] = rows // 2
    elif where != "anywhere":
        made.rows[:last] %= min(rows, 70)
        made.rows[:last] = made.rows[:last] if where == "first" else rows - 1 - made.rows[:last]
    check(made)


@pytest.mark.parametrize("rule", list(SETTINGS))
@pytest.mark.parametrize("how", [{}, {"weighted": True}, {"unpooled": True}])
def test_any_number_of_threads_gives_the_same_bits(rule: str, how: dict[str, bool]) -> None:
    start = case(rule, rows=(70, 9000), dims=(20, 8), features=(1, 2), batch_size=4000, longest=4, **how)  # type: ignore[arg-type]

    def step() -> list[torch.Tensor]:
        made = start.copy()
        fused_step_(*made.arguments())
        return made.tensors()

    assert_same_on_any_threads(step, (1, 2, 3, 7))


@pytest.mark.parametrize("side", ["begin", "end"])
@pytest.mark.parametrize("dim", [1, 3, 4, 7, 8, 12, 15, 20, 28, 60, 100, 132])
@pytest.mark.parametrize(("rule", "unpooled"), [("sgd", False), ("adagrad", True), ("partial_rowwise_adam", False)])
def test_nothing_outside_of_its_tensors_is_touched(rule: str, unpooled: bool, dim: int, side: str) -> None:
    """Each tensor lies at a page that nobody may touch."""
    place = guarded(side)
    made = case(rule, rows=(5,), dims=(dim,), features=(1,), batch_size=3, longest=4, unpooled=unpooled)
    made.weights, made.states = [place(made.weights[0])], [[place(state)] for (state,) in made.states]
    made.rows, made.offsets, made.gradients = place(made.rows), place(made.offsets), place(made.gradients)
    assert signal_of(lambda: fused_step_(*made.arguments())) == 0


def test_gradients_are_summed_in_the_order_of_the_batch() -> None:
    made = case("sgd", rows=(2,), dims=(1,), features=(1,), batch_size=3, longest=1)
    for order, total in (([1e8, 1.0, -1e8], 0.0), ([1e8, -1e8, 1.0], 1.0)):
        made.weights[0].zero_()
        fused_step_(
            torch.zeros(3, dtype=torch.int64), torch.arange(4), [torch.tensor(order).view(3, 1)], made.weights, [], [],
            [0], [True], "sgd", list(StepNumbers(-1.0)),
        )  # fmt: skip
        assert made.weights[0].tolist() == [[total], [0.0]]


def test_only_tables_that_are_stepped_change_and_the_states_of_others_are_not_read() -> None:
    made = case("adam")
    before = made.copy()
    arguments = list(made.arguments())
    arguments[7] = [True, False, True]
    nothing = torch.empty(0)
    arguments[4], arguments[5] = ([states[0], nothing, states[2]] for states in made.states)
    fused_step_(*arguments)
    by_reference = before.copy()
    by_reference.step_by_reference()
    assert torch.equal(made.weights[1], before.weights[1])
    for table in (0, 2):
        torch.testing.assert_close(made.weights[table], by_reference.weights[table], rtol=1e-5, atol=1e-6)


def test_steps_of_tables_that_are_stepped_are_counted_also_without_a_position() -> None:
    made = case("sgd", batch_size=0)
    arguments, counts = list(made.arguments()), torch.tensor([4.0, 5.0, 6.0])
    arguments[7], arguments[12] = [True, False, True], counts
    fused_step_(*arguments)
    assert counts.tolist() == [5.0, 5.0, 7.0]
    arguments[8] = "adagrid"
    with pytest.raises(RuntimeError, match="has no rule"):
        fused_step_(*arguments)
    assert counts.tolist() == [5.0, 5.0, 7.0]


def test_a_table_is_left_alone_if_no_output_of_its_features_has_a_gradient() -> None:
    """Neither weight decay nor moments move it, and its steps are not counted."""
    made = replace(case("adam", dims=(8,) * 3, weight_decay=0.1, unpooled=True), unused=(1, 2))  # of the second table
    before, counts = made.copy(), torch.tensor([4.0, 5.0, 6.0])
    arguments = list(made.arguments())
    arguments[12] = counts
    fused_step_(*arguments)
    assert counts.tolist() == [5.0, 5.0, 7.0]
    for after, start in zip([made.weights, *made.states], [before.weights, *before.states], strict=True):
        assert [torch.equal(one, other) for one, other in zip(after, start, strict=True)] == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    """Every kind of number: halfway between two neighbours, smaller than the smallest, beyond the largest, NaN."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[every.isfinite()].sort().values.unique()
    between = (every[1:].double() + every[:-1].double()).div(2).float()
    around = [between, between.nextafter(torch.tensor(9e9)), between.nextafter(torch.tensor(-9e9))]
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 3e38, -3e38, 1e-45, -1e-45, 65519.99, 65520.0])
    values = torch.cat([every, *around, special])
    weight = torch.zeros(1, values.numel(), dtype=dtype)
    fused_step_(torch.tensor([0]), torch.tensor([0, 1]), [values.view(1, -1)], [weight], [], [], [0], [True], "sgd",
                list(StepNumbers(-1.0)))  # fmt: skip
    torch.testing.assert_close(weight[0], values.to(dtype), rtol=0, atol=0, equal_nan=True)
    start = every.to(dtype).view(1, -1).clone()
    fused_step_(torch.tensor([0]), torch.tensor([0, 1]), [torch.zeros(1, every.numel())], [start], [], [], [0], [True],
                "sgd", list(StepNumbers(-1.0)))  # fmt: skip
    assert torch.equal(start[0], every.to(dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.tensor([50])}, "row 50 is beyond the end of table 0, which has 50 rows"),
        ({0: torch.tensor([1]).int()}, "rows must be int64"),
        ({1: torch.tensor([0, 2])}, "offsets must ascend within"),
        ({2: [torch.zeros(1, 7)]}, r"gradients must be contiguous float32 \[1, 8\]"),
        ({3: [torch.zeros(50, 8, dtype=torch.float64)]}, "all float32, float16 or bfloat16"),
        ({4: []}, "needs 1 first states, got 0"),
        ({5: [torch.zeros(50, 8)]}, "needs 0 second states, got 1"),
        ({8: "adagrid"}, "has no rule adagrid"),
        ({10: True, 11: torch.ones(1)}, "are for sums, not for means"),
        ({11: torch.ones(1), 13: True}, "neither means nor per_sample_weights"),
        ({2: [torch.zeros(1, 8)] * 2, 13: True}, "or one per feature, got 2"),
        ({12: torch.ones(2)}, r"step_counts must be contiguous float32 \[1\]"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_and_nothing_changes(change: dict[int, Any], message: str) -> None:
    made = case(rows=(50,), dims=(8,), features=(1,), batch_size=1, longest=1)
    arguments = list(made.arguments())
    arguments[0], arguments[1] = torch.tensor([7]), torch.tensor([0, 1])
    before = [tensor.clone() for tensor in made.tensors()]
    for position, value in change.items():
        arguments[position] = value
    features = 2 if 1 in change and len(change[1]) == 4 else 1
    arguments[6] = arguments[6] * features
    with pytest.raises(IndexError if "beyond" in message else RuntimeError, match=message):
        fused_step_(*arguments)
    assert all(torch.equal(one, other) for one, other in zip(made.tensors(), before, strict=True))


@pytest.mark.parametrize("rule", list(SETTINGS))
@pytest.mark.parametrize("how", [{"weighted": True}, {"unpooled": True}])
def test_opcheck(rule: str, how: dict[str, bool]) -> None:
    arguments = case(rule, **how).arguments()  # type: ignore[arg-type]
    torch.library.opcheck(torch.ops.recfx.fused_step_.default, arguments)


def subtract(values: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """A rule that keeps the sum of the gradients of each row's elements, and their number of steps."""
    state["total"].add_(gradient)
    state["steps"].add_(1)
    return values - gradient


def test_small_gradients_are_summed_before_the_weight_is_rounded() -> None:
    weight = torch.full((2, 1), 2048.0, dtype=torch.float16)  # whose neighbour above is two away
    step_touched_rows(subtract, weight, torch.zeros(4, dtype=torch.int64), torch.full((4, 1), -0.5), _state(2))
    assert weight.tolist() == [[2050.0], [2048.0]]


def _state(rows: int) -> dict[str, torch.Tensor]:
    return {"total": torch.zeros(rows, 1), "steps": torch.zeros(rows, 1)}
