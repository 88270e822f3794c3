"""The kernels, and the references that define what they do: in Triton on the device, in C++ on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recfx.doctor import shapes
from recfx.doctor.kernel_check import KernelCheck, Shape
from recfx.doctor.lookup_case import stepped
from recfx.kernels.build import launch, library
from recfx.kernels.index.find_rows import ReadIndexes, find_rows_reference, find_rows_triton
from recfx.kernels.lookup.bag_offsets import bag_offsets_triton, kernel_reference
from recfx.kernels.lookup.per_sample_weights import (
    per_sample_weight_gradients_reference,
    per_sample_weight_gradients_triton,
)
from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from recfx.kernels.lookup.pooled_lookup_reference import pooled_lookup
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_reference, quantized_lookup_triton
from recfx.kernels.route.bucketize import bucketize_reference, bucketize_triton
from recfx.kernels.route.select_keys import select_keys_reference, select_keys_triton
from recfx.kernels.step.fused_step import rules
from recfx.kernels.step.row_initialization import (
    init_rows_of_tables_reference_,
    init_rows_reference_,
    init_rows_triton_,
)
from recfx.optim.fused_step_op import fused_step_triton_, rules_in_triton, triton_module
from recfx.optim.rules import RULES
from recfx.optim.rules.rule import Rule

_MEAN, _MEAN_ON_HOST = 11, 10  # the position of `mean` among the operator's arguments


def kernels_here(device: torch.device) -> Iterator[tuple[KernelCheck, torch.device, str]]:
    """The kernels that can be run: each with where it runs, as a device and as ``device`` or ``host``."""
    if library.load():
        yield from ((check, torch.device("cpu"), "host") for check in host_checks())
    if not launch.why_not(device):
        yield from ((check, device, "device") for check in device_checks())


def device_checks() -> Iterator[KernelCheck]:
    """All of them."""
    yield KernelCheck("pooled_lookup_triton", shapes.pooled, pooled_lookup_triton, pooled_lookup)
    yield KernelCheck("quantized_lookup_triton", shapes.quantized, quantized_lookup_triton, quantized_lookup_reference)
    yield KernelCheck(
        "per_sample_weight_gradients_triton", shapes.weight_gradients, per_sample_weight_gradients_triton,
        per_sample_weight_gradients_reference, in_one_order=False,
    )  # fmt: skip
    yield KernelCheck("find_rows_triton", shapes.index_reads, find_rows_triton, _find_rows_reference)
    yield KernelCheck("bag_offsets_triton", shapes.bags, _bags(bag_offsets_triton), _bags(kernel_reference))
    yield KernelCheck("select_keys_triton", shapes.selections, select_keys_triton, select_keys_reference)
    yield KernelCheck("bucketize", shapes.routed, bucketize_triton, bucketize_reference)
    of_rows = (after(init_rows_triton_, 1, 2, 3), after(init_rows_of_tables_reference_, 1, 2, 3))
    yield KernelCheck("init_rows_triton_", shapes.new_rows, *of_rows)
    for rule in rules_in_triton():
        of_rule = (partial(_steps, rule), after(fused_step_triton_, 3, 4, 5), partial(stepped_by, rule, _MEAN))
        yield KernelCheck(f"fused_step_triton_: {rule.name}", *of_rule, in_one_order=False)


def after(operator: Callable[..., Any], *changed: int) -> Callable[..., Any]:
    """A call of an operator that gives back the arguments that it has changed."""

    def call(*arguments: Any) -> list[Any]:
        operator(*arguments)
        return [arguments[place] for place in changed]

    return call


def _bags(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Offsets, where each key's ids begin, and whether anything is wrong with the batch."""

    def call(*arguments: Any) -> list[Tensor]:
        offsets, reports = operator(*arguments)
        borders = len(arguments[3]) + 1
        return [offsets, reports[:borders], reports[borders:].any()]

    return call


def _find_rows_reference(ids: Tensor, ends: Tensor, *indexes: Tensor) -> tuple[Tensor, Tensor]:
    return find_rows_reference(ids, ends, ReadIndexes(*indexes))


def _steps(rule: Rule, quick: bool) -> Iterator[Shape]:
    for text, case, states, is_stepped, mean in shapes.steps(rule, quick):
        first, second = (*states, [], [])[:2]
        of_rule = (triton_module(rule), rule.has_row_state, shapes.numbers_of(rule), mean, None)
        tables = (case.weights, first, second, case.table_of_feature, is_stepped)
        yield Shape(f"{text}{', mean' if mean else ''}", (case.rows, case.offsets, case.gradients, *tables, *of_rule))


def stepped_by(rule: Rule, mean: int, *arguments: Any) -> list[Any]:
    """What the rule's own ``update`` makes of weights and states.

    Args:
        rule: see ``Rule``.
        mean: which of the arguments says whether sums are means.
        arguments: of a fused step.
    """
    rows, offsets, gradients, weights, first, second, table_of_feature, is_stepped, *_ = arguments
    states = [first, second][: len(rule.states)]
    tables = (weights, table_of_feature)
    new_weights, new_states = stepped(rows, offsets, gradients, *tables, rule, states, is_stepped, arguments[mean])
    return [new_weights, *(*new_states, [], [])[:2]]


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
        of_rule = (partial(_host_steps, rule), after(_operator("fused_step_"), 3, 4, 5), partial(_stepped_by, rule))
        yield KernelCheck(f"fused_step_: {rule.name}", *of_rule, in_one_order=False)


def _operator(name: str) -> Any:
    return lambda *arguments: getattr(library.operators(), name)(*arguments)


def _pooled_lookup(*arguments: Any) -> Tensor:
    return torch.cat(library.operators().pooled_lookup(*arguments))


def _stepped_by(rule: Rule, rows: Tensor, offsets: Tensor, gradients: list[Tensor], *others: Any) -> list[Any]:
    return stepped_by(rule, _MEAN_ON_HOST, rows, offsets, *gradients, *others)


def _new_rows(quick: bool) -> Iterator[Shape]:
    """The first table of each."""
    for shape in shapes.new_rows(quick):
        entries, weights, _, _, keys, first_columns, lows, highs, *_ = shape.arguments
        rows, ids, _ = entries[entries[:, 2] == 0].unbind(1)
        table = (weights[0], rows.clone(), ids.clone(), keys[0], lows[0], highs[0], first_columns[0])
        yield Shape(shape.text, table)


def _host_steps(rule: Rule, quick: bool) -> Iterator[Shape]:
    for text, case, states, is_stepped, mean in shapes.steps(rule, quick):
        first, second = (*states, [], [])[:2]
        of_rule = (rule.name, shapes.numbers_of(rule) * len(case.weights), mean, None, None)
        tables = (case.weights, first, second, case.table_of_feature, is_stepped)
        yield Shape(f"{text}{', mean' if mean else ''}", (case.rows, case.offsets, [case.gradients], *tables, *of_rule))
