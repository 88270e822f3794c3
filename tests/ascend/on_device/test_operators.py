"""The operators, whose launches are sized for the device, against their references on many shapes."""

import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.commandline.doctor.cases import DTYPES, GROUP, STEPS, LookupCase, index_read, step_
from recfx.commandline.doctor.checks import check_all
from recfx.kernels.build import launch
from recfx.kernels.index.find_rows import ReadIndexes, find_rows, find_rows_reference
from recfx.kernels.lookup.per_sample_weights import (
    per_sample_weight_gradients_reference,
    per_sample_weight_gradients_triton,
)
from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from recfx.kernels.lookup.pooled_lookup_reference import pooled_lookup
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_reference, quantized_lookup_triton
from recfx.kernels.lookup.quantized_rows import BITS
from recfx.kernels.route.bucketize import Routes
from recfx.optim.fused_step_op import fused_step_triton_, rules_in_triton, triton_module
from recfx.optim.rules import RULES
from recfx.optim.rules.rule import Rule
from tests.ascend.on_device.device import assert_same, device, moved
from tests.kernels.quantized import lookups
from tests.kernels.routes import batches, by_kernels, by_reference

FEW = settings(max_examples=int(os.environ.get("RECFX_EXAMPLES", "40")), deadline=None)
CASES = st.builds(
    LookupCase,
    st.lists(st.integers(1, 130), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.integers(0, 10**6),
)


@pytest.fixture(autouse=True)
def _there_is_a_device() -> None:
    device()


@given(CASES, st.sampled_from(["sum", "mean", "weighted"]))
@FEW
def test_pooled_lookup(case: LookupCase, kind: str) -> None:
    scales = case.scales if kind == "weighted" else None
    arguments = (case.rows, case.offsets, case.weights, case.table_of_feature, kind == "mean", scales)
    assert_same(pooled_lookup_triton(*moved(arguments)), pooled_lookup(*arguments), in_one_order=True)


ALIKE = st.builds(
    lambda dim, tables, *rest: LookupCase([dim] * tables, *rest),
    st.integers(1, 130),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.integers(0, 10**6),
)
"""Tables of one dim."""


@given(ALIKE)
@FEW
def test_lookup_without_pooling(case: LookupCase) -> None:
    arguments = (case.rows, case.borders, case.weights, case.table_of_feature, False, None, True)
    assert_same(pooled_lookup_triton(*moved(arguments)), pooled_lookup(*arguments), in_one_order=True)


@given(CASES)
@FEW
def test_per_sample_weight_gradients(case: LookupCase) -> None:
    arguments = (case.rows, case.offsets, case.gradients, case.weights, case.table_of_feature)
    assert_same(
        per_sample_weight_gradients_triton(*moved(arguments)), per_sample_weight_gradients_reference(*arguments)
    )


@pytest.mark.parametrize("unpooled", [False, True])
@given(ALIKE, CASES, st.sampled_from(rules_in_triton()), st.booleans(), st.integers(0, 15))
@FEW
def test_fused_step(unpooled: bool, alike: LookupCase, case: LookupCase, rule: Rule, mean: bool, stepped: int) -> None:
    """Weights and states; tables that are not stepped keep every bit. The step of rows that are not pooled is that of
    sums of one id: ``n`` bags of each feature, of which only its own are not empty.
    """
    case, mean = (alike, False) if unpooled else (case, mean)
    bags, offsets, gradients, given_gradients = case.offsets, case.offsets, case.gradients, case.gradients
    if unpooled:
        ids, features = case.rows.numel(), len(case.table_of_feature)
        given_gradients = torch.randn(ids, case.dims[0], generator=torch.Generator().manual_seed(ids))
        begins = [torch.arange(ids).clamp(low, high) for low, high in pairwise(case.borders.tolist())]
        bags, offsets, gradients = case.borders, torch.cat([*begins, torch.tensor([ids])]), given_gradients
        gradients = gradients.repeat(1, features)
    is_stepped = [bool(stepped >> table & 1) for table in range(len(case.dims))]
    states = [[torch.rand(state.shape(*weight.shape)) for weight in case.weights] for state in rule.states]
    weights, on_device = moved(case.weights), moved(states)
    first, second = (*on_device, [], [])[:2]
    of_rule: Any = (triton_module(rule), rule.has_row_state, list(rule.step_numbers(STEPS, GROUP)), mean, None)
    tables = (weights, first, second, case.table_of_feature, is_stepped)
    fused_step_triton_(*moved((case.rows, bags, given_gradients)), *tables, *of_rule, unpooled)
    before = [weight.clone() for weight in case.weights]
    batch = (case.rows, offsets, gradients, case.weights, *(*states, [], [])[:2])
    step_(rule, GROUP, mean, *batch, case.table_of_feature, is_stepped)
    assert_same(weights, case.weights)
    assert_same(on_device, states)
    for table, is_one in enumerate(is_stepped):
        assert is_one or torch.equal(weights[table].cpu(), before[table])


@pytest.mark.parametrize("bits", BITS)
@given(data=st.data())
@FEW
def test_quantized_lookup(bits: int, data: st.DataObject) -> None:
    *arguments, _ = data.draw(lookups(bits, multiple=1))
    actual, expected = quantized_lookup_triton(*moved(arguments)), quantized_lookup_reference(*arguments)
    assert_same(actual, expected, in_one_order=True)


@given(batches())
@FEW
def test_bucketize(batch: tuple[torch.Tensor, torch.Tensor, int, Routes, torch.Tensor | None]) -> None:
    ids, lengths, batch_size, routes, weights = batch
    bucketized = by_kernels(moved(ids), moved(lengths), batch_size, routes, moved(weights))
    for one, other in zip(bucketized, by_reference(*batch), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_same(one, other, in_one_order=True)


@pytest.mark.parametrize("count", [0, 1, 5, 700])
def test_find_rows(count: int) -> None:
    """Full tables with dense and shared rows, a table without an index, id -1, the extremes, and absent ids."""
    ids, ends, *indexes = index_read(count)
    rows = find_rows(moved(ids), moved(ends), ReadIndexes(*moved(tuple(indexes))))
    assert_same(rows, find_rows_reference(ids, ends, ReadIndexes(*indexes)))


def test_the_cases_of_the_doctor() -> None:
    answers = list(check_all(device(), quick=False))
    assert "device" in {answer.where for answer in answers}
    assert [answer for answer in answers if answer.message] == []


def test_one_hot_row_among_very_many_positions() -> None:
    """More positions than programs, most of them of one row: sums cross the borders of chunks."""
    samples = 100 if launch.is_interpreted() else 20_000  # several positions per program, however many there are
    case = LookupCase([64, 8], samples, seed=3)
    case.rows = torch.where((case.rows >= 0) & (torch.arange(case.rows.numel()) % 5 > 0), 2, case.rows)
    case.gradients = (case.gradients * 16).round() / 16  # sums are exact, in any order
    sgd = next(rule for rule in RULES if rule.name == "sgd")
    weights = moved(case.weights)
    of_rule: Any = (triton_module(sgd), False, list(sgd.step_numbers(1.0, {**GROUP, "weight_decay": 0.0})), False, None)
    batch = moved((case.rows, case.offsets, case.gradients))
    fused_step_triton_(*batch, weights, [], [], case.table_of_feature, [True, True], *of_rule)
    of_case: Any = (case.rows, case.offsets, case.gradients, case.weights, [], [], case.table_of_feature, [True, True])
    step_(sgd, {**GROUP, "weight_decay": 0.0}, False, *of_case)
    assert_same(weights, case.weights)
