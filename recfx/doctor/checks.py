"""The kernels, and the references that define what they do: in Triton on the device, in C++ on the host."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from recfx.doctor import shapes
from recfx.doctor.report import Answer
from recfx.doctor.shapes import Shape, stepped
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

# A GPU fuses multiplications and additions, and its division and square root may be a bit off.
ON_A_DEVICE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ON_THE_CPU = ON_A_DEVICE | {torch.float32: 1e-5}


@dataclass(frozen=True)
class KernelCheck:
    """One kernel.

    Args:
        name: of the operator of namespace ``recfx``, perhaps with more after a colon.
        shapes: the smallest first; the argument says whether few are enough.
        kernel: calls the operator, on tensors that it may change, and gives back what it made of them.
        reference: likewise, by the reference.
        in_one_order: whether both add up in one order.
    """

    name: str
    shapes: Callable[[bool], Iterator[Shape]]
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    in_one_order: bool = True

    def mismatch(self, shape: Shape, device: torch.device) -> str:
        """What differs on a shape, in one line; ``""`` if nothing does."""
        actual = self.kernel(*moved(shape.arguments, device))
        expected = self.reference(*moved(shape.arguments, torch.device("cpu")))
        return mismatch(actual, expected, tolerances(device, self.in_one_order))

    def opcheck(self, shape: Shape, device: torch.device, quick: bool) -> None:
        """Raise whatever ``torch.library.opcheck`` does; ``quick``: no compilation."""
        utilities = ("test_schema", "test_faketensor", *(() if quick else ("test_aot_dispatch_dynamic",)))
        operator = getattr(library.operators(), self.name.partition(":")[0]).default
        torch.library.opcheck(operator, moved(shape.arguments, device), test_utils=utilities)

    def run(self, device: torch.device, where: str, quick: bool) -> Answer:
        """Run the kernel on all its shapes, and ``opcheck`` on the smallest."""
        shapes = list(self.shapes(quick))
        failures = [(shape.text, *attempt(partial(self.mismatch, shape, device))) for shape in shapes]
        wrong = [failure for failure in failures if failure[1]]
        if wrong:
            smallest, message, trace = wrong[0]
        else:
            smallest, (message, trace) = "", attempt(lambda: self.opcheck(shapes[0], device, quick))
            message = message and f"opcheck: {message}"
        return Answer(self.name, where, len(shapes), len(wrong), smallest, message, trace)


def attempt(check: Callable[[], str | None]) -> tuple[str, str]:
    """What is wrong, in one line, and the traceback of what was raised.

    A compiler of kernels that is new to a device fails in any way. To find that is what the check is for, so every
    ``Exception`` is a result. Ctrl-C is none.
    """
    try:
        return check() or "", ""
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {text}"[:500], "".join(traceback.format_exception(error))


def tolerances(device: torch.device, in_one_order: bool = False) -> Mapping[torch.dtype, float]:
    """Absolute and relative, by dtype; 0 for all that are not listed.

    Args:
        device: on which the kernel ran.
        in_one_order: kernel and reference add up in one order: on the CPU, numbers are then equal bit for bit.
    """
    return ON_A_DEVICE if device.type != "cpu" else {} if in_one_order else ON_THE_CPU


def mismatch(actual: Any, expected: Any, allowed: Mapping[torch.dtype, float]) -> str:
    """What differs, in one line; ``""`` if nothing does. Integers, shapes and dtypes have to be equal.

    Args:
        actual: a tensor, None, or a sequence of these, on any device.
        expected: likewise.
        allowed: see ``tolerances``.
    """
    results, references = tree_leaves(actual), tree_leaves(expected)
    if len(results) != len(references):
        return f"{len(results)} results instead of {len(references)}"
    for place, (one, other) in enumerate(zip(results, references, strict=True)):
        tolerance = allowed.get(other.dtype, 0.0) if isinstance(other, Tensor) else 0.0
        try:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True, check_device=False)
        except (AssertionError, TypeError) as error:
            return f"result {place}: {' '.join(str(error).split())}"
    return ""


def moved(values: Any, device: torch.device) -> Any:
    """A copy of ``values``, with every tensor on the device in memory of its own."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), values)


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
        of_rule = (triton_module(rule), rule.has_row_state)
        yield KernelCheck(
            f"fused_step_triton_: {rule.name}", partial(shapes.steps, rule, of_rule, False),
            after(fused_step_triton_, 3, 4, 5), partial(_stepped_by, rule, _MEAN), in_one_order=False,
        )  # fmt: skip


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


def _stepped_by(rule: Rule, mean: int, *arguments: Any) -> list[Any]:
    """What the rule's own ``update`` makes of weights and states; ``mean`` is the place of that argument."""
    rows, offsets, gradients, weights, first, second, table_of_feature, is_stepped, *_ = arguments
    (gradients,) = gradients if isinstance(gradients, list) else (gradients,)
    states = [first, second][: len(rule.states)]
    batch = (rows, offsets, gradients, weights, table_of_feature)
    new_weights, new_states = stepped(*batch, rule, states, is_stepped, arguments[mean])
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
        yield KernelCheck(
            f"fused_step_: {rule.name}", partial(shapes.steps, rule, (rule.name,), True),
            after(_operator("fused_step_"), 3, 4, 5), partial(_stepped_by, rule, _MEAN_ON_HOST), in_one_order=False,
        )  # fmt: skip


def _operator(name: str) -> Any:
    return lambda *arguments: getattr(library.operators(), name)(*arguments)


def _pooled_lookup(*arguments: Any) -> Tensor:
    return torch.cat(library.operators().pooled_lookup(*arguments))


def _new_rows(quick: bool) -> Iterator[Shape]:
    """The first table of each."""
    for shape in shapes.new_rows(quick):
        entries, weights, _, _, keys, first_columns, lows, highs, *_ = shape.arguments
        rows, ids, _ = entries[entries[:, 2] == 0].unbind(1)
        table = (weights[0], rows.clone(), ids.clone(), keys[0], lows[0], highs[0], first_columns[0])
        yield Shape(shape.text, table)
