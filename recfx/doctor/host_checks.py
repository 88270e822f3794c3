"""The kernels in C++, which run on the host whatever the device is, and the references that define what they do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recfx.doctor import shapes
from recfx.doctor.device_checks import after, stepped_by
from recfx.doctor.kernel_check import KernelCheck, Shape
from recfx.kernels.build import library
from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients_reference
from recfx.kernels.lookup.pooled_lookup_reference import pooled_lookup
from recfx.kernels.route.bucketize import bucketize_reference
from recfx.kernels.step.fused_step import rules
from recfx.kernels.step.row_initialization import init_rows_reference_
from recfx.optim.rules import RULES
from recfx.optim.rules.rule import Rule

_MEAN = 10  # the position of `mean` among the operator's arguments


def host_checks() -> Iterator[KernelCheck]:
    """All of them."""
    yield KernelCheck("pooled_lookup", shapes.pooled, _pooled_lookup, pooled_lookup)
    yield KernelCheck(
        "per_sample_weight_gradients", shapes.weight_gradients, _operator("per_sample_weight_gradients"),
        per_sample_weight_gradients_reference, in_one_order=False,
    )  # fmt: skip
    yield KernelCheck("bucketize", shapes.routed, _operator("bucketize"), bucketize_reference)
    of_rows = (after(_operator("init_rows_"), 0), after(init_rows_reference_, 0))
    yield KernelCheck("init_rows_", _new_rows, *of_rows)
    for rule in (rule for rule in RULES if rule.name in rules()):
        of_rule = (partial(_steps, rule), after(_operator("fused_step_"), 3, 4, 5), partial(_stepped_by, rule))
        yield KernelCheck(f"fused_step_: {rule.name}", *of_rule, in_one_order=False)


def _operator(name: str) -> Any:
    return lambda *arguments: getattr(library.operators(), name)(*arguments)


def _pooled_lookup(*arguments: Any) -> Tensor:
    return torch.cat(library.operators().pooled_lookup(*arguments))


def _stepped_by(rule: Rule, rows: Tensor, offsets: Tensor, gradients: list[Tensor], *others: Any) -> list[Any]:
    return stepped_by(rule, _MEAN, rows, offsets, *gradients, *others)


def _new_rows(quick: bool) -> Iterator[Shape]:
    """The first table of each."""
    for shape in shapes.new_rows(quick):
        entries, weights, _, _, keys, first_columns, lows, highs, *_ = shape.arguments
        rows, ids, _ = entries[entries[:, 2] == 0].unbind(1)
        table = (weights[0], rows.clone(), ids.clone(), keys[0], lows[0], highs[0], first_columns[0])
        yield Shape(shape.text, table)


def _steps(rule: Rule, quick: bool) -> Iterator[Shape]:
    for text, case, states, is_stepped, mean in shapes.steps(rule, quick):
        first, second = (*states, [], [])[:2]
        of_rule = (rule.name, shapes.numbers_of(rule) * len(case.weights), mean, None, None)
        tables = (case.weights, first, second, case.table_of_feature, is_stepped)
        yield Shape(f"{text}{', mean' if mean else ''}", (case.rows, case.offsets, [case.gradients], *tables, *of_rule))
