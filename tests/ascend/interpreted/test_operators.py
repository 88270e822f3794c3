"""The operators of the kernels in Triton: ``opcheck``, and their references on many shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recfx.kernels.build import launch
from recfx.kernels.index.find_rows import IndexFacts, ReadIndexes, find_rows
from recfx.kernels.lookup.per_sample_weights import (
    per_sample_weight_gradients_reference,
    per_sample_weight_gradients_triton,
)
from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from recfx.kernels.lookup.pooled_lookup_reference import pooled_lookup
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_triton
from recfx.kernels.lookup.quantized_rows import quantize_rows
from recfx.kernels.route.bucketize import Routes
from recfx.lowering.step.trainable_lookup import TrainedBatch, gradients_of_table
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.fused_step_op import fused_step_triton_, rules_in_triton, triton_module
from recfx.optim.rules.rule import STEP, Rule
from tests.ascend.interpreted.specs import specs_of
from tests.kernels.routes import by_kernels

GROUP = {"lr": 0.1, "eps": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.01}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


_NO_INDEX = IndexFacts.without_index()


class Lookup:
    """Tables and one batch: rows of -1, empty bags, and features that share the first table."""

    def __init__(self, dims: list[int], batch_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.dims, self.batch_size = dims, batch_size
        self.table_of_feature = [0, *range(len(dims))]
        self.weights = [torch.randn(7 + table, dim, generator=draw).to(dtype) for table, dim in enumerate(dims)]
        lengths = torch.randint(0, 5, (len(self.table_of_feature) * batch_size,), generator=draw)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        sizes = lengths.view(len(self.table_of_feature), -1).sum(dim=1).tolist()
        counts = [self.weights[table].shape[0] for table in self.table_of_feature]
        parts = zip(counts, sizes, strict=True)
        self.rows = torch.cat([torch.randint(-1, count, (size,), generator=draw) for count, size in parts])
        self.scales = torch.rand(self.rows.numel(), generator=draw)
        self.gradients = torch.randn(batch_size, sum(dims) + dims[0], generator=draw)

    @property
    def batch(self) -> TrainedBatch:
        return TrainedBatch(self.weights, self.rows, self.offsets, None)


lookups = st.builds(
    Lookup,
    st.lists(st.integers(1, 70), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from(DTYPES),
    st.integers(0, 10**6),
)


@given(lookups, st.sampled_from(["sum", "mean", "weighted"]))
@settings(max_examples=40)
def test_pooled_lookup(case: Lookup, kind: str) -> None:
    scales = case.scales if kind == "weighted" else None
    arguments = (case.rows, case.offsets, case.weights, case.table_of_feature, kind == "mean", scales)
    # Both sum in the order of the rows, in float32.
    assert torch.equal(pooled_lookup_triton(*arguments), pooled_lookup(*arguments))


@given(lookups)
@settings(max_examples=20)
def test_per_sample_weight_gradients(case: Lookup) -> None:
    arguments = (case.rows, case.offsets, case.gradients, case.weights, case.table_of_feature)
    found, wanted = per_sample_weight_gradients_triton(*arguments), per_sample_weight_gradients_reference(*arguments)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def states_of(rule: Rule, weights: list[Tensor]) -> list[list[Tensor]]:
    return [[torch.rand(state.shape(*weight.shape)) for weight in weights] for state in rule.states]


def arguments_of(case: Lookup, rule: Rule, states: list[list[Tensor]], is_stepped: list[bool], mean: bool) -> Any:
    first, second = (*states, [], [])[:2]
    numbers = list(rule.step_numbers(3.0, GROUP))
    of_rule = (triton_module(rule), rule.has_row_state, numbers)
    tables = (case.weights, first, second, case.table_of_feature, is_stepped)
    return (case.rows, case.offsets, case.gradients, *tables, *of_rule, mean, None)


@given(lookups, st.sampled_from(rules_in_triton()), st.booleans(), st.integers(0, 15))
@settings(max_examples=40)
def test_fused_step(case: Lookup, rule: Rule, mean: bool, stepped: int) -> None:
    """Against the rule's own step; tables that are not stepped keep every bit."""
    is_stepped = [bool(stepped >> table & 1) for table in range(len(case.dims))]
    states = states_of(rule, case.weights)
    wanted, wanted_states = [each.clone() for each in case.weights], [[each.clone() for each in of] for of in states]
    for table in (table for table, is_one in enumerate(is_stepped) if is_one):
        state: dict[str, Any] = {each.name: of[table] for each, of in zip(rule.states, wanted_states, strict=True)}
        optimizer = FusedOptimizer(rule, dict(GROUP), state | ({STEP: torch.tensor(2.0)} if rule.counts_steps else {}))
        pooling = "MEAN" if mean else "SUM"
        of_table = gradients_of_table(case.batch, case.gradients, specs_of(case.dims), pooling, table)
        optimizer.step(wanted[table], *of_table)
    before = [weight.clone() for weight in case.weights]
    fused_step_triton_(*arguments_of(case, rule, states, is_stepped, mean))
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[case.weights[0].dtype]
    for table, is_one in enumerate(is_stepped):
        torch.testing.assert_close(case.weights[table], wanted[table], rtol=tolerance, atol=tolerance)
        assert is_one or torch.equal(case.weights[table], before[table])
    torch.testing.assert_close(states, wanted_states, rtol=1e-5, atol=1e-6)


def test_operators_launch_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a reference took their place, its answers would be as right."""
    launched: list[str] = []
    real = launch.launch

    def counting(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.__name__)
        real(kernel, *arguments, **constants)

    monkeypatch.setattr(launch, "launch", counting)
    case = Lookup([5, 8], 3)
    pooled_lookup_triton(case.rows, case.offsets, case.weights, case.table_of_feature, False, None)
    per_sample_weight_gradients_triton(case.rows, case.offsets, case.gradients, case.weights, case.table_of_feature)
    rule = rules_in_triton()[0]
    fused_step_triton_(*arguments_of(case, rule, states_of(rule, case.weights), [True, True], False))
    tables = [quantize_rows(weight, 8) for weight in case.weights]
    quantized_lookup_triton(case.rows, case.offsets, tables, case.dims, 8, case.table_of_feature, False, None)
    routes = Routes([[0, 4, 10]], [0], [10], [0], [0], [0, 0], [0, 1])
    by_kernels(torch.tensor([3, 9]), torch.tensor([2]), 1, routes)
    no_index = ReadIndexes(torch.empty(0, 2, dtype=torch.int64), torch.tensor([-1]), torch.tensor([_NO_INDEX]))
    find_rows(torch.tensor([9, 3]), torch.tensor([2]), no_index)
    assert launched == [
        "recfx_pooled_lookup",
        "recfx_per_sample_weight_gradients",
        "recfx_fused_step",
        "recfx_fused_step_of_borders",
        "recfx_quantized_lookup",
        "recfx_bucket_counts",
        "recfx_bucket_scatter",
        "recfx_find_rows",
    ]


def test_opcheck_of_reading_operators() -> None:
    case = Lookup([5, 8], 3)
    for mean, scales in ((False, None), (True, None), (False, case.scales)):
        torch.library.opcheck(
            pooled_lookup_triton, (case.rows, case.offsets, case.weights, case.table_of_feature, mean, scales)
        )
    arguments = (case.rows, case.offsets, case.gradients, case.weights, case.table_of_feature)
    torch.library.opcheck(per_sample_weight_gradients_triton, arguments)


@pytest.mark.parametrize("rule", rules_in_triton(), ids=[rule.name for rule in rules_in_triton()])
def test_opcheck_of_the_step(rule: Rule) -> None:
    case = Lookup([5, 8], 3)
    states = states_of(rule, case.weights)
    torch.library.opcheck(fused_step_triton_, arguments_of(case, rule, states, [True, True], False))


def test_a_batch_without_samples() -> None:
    case = Lookup([5, 8], 1)
    offsets, rows = torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    pooled = pooled_lookup_triton(rows, offsets, case.weights, case.table_of_feature, False, None)
    assert pooled.shape == (0, 18)
    gradients = per_sample_weight_gradients_triton(
        rows, offsets, torch.empty(0, 18), case.weights, case.table_of_feature
    )
    assert gradients.shape == (0,)
