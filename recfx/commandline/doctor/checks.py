"""The kernels, and the references that define what they do: in Triton on the device, in C++ on the host."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from tqdm import tqdm

from recfx.commandline.doctor.cases import GROUP, STEPS, LookupCase, cases, index_read, step_
from recfx.commandline.doctor.report import Answer
from recfx.kernels.build import launch, library, tuned
from recfx.kernels.index.find_rows import ReadIndexes, find_rows_reference, find_rows_triton
from recfx.kernels.lookup.bag_offsets import bag_offsets_triton, kernel_reference
from recfx.kernels.lookup.per_sample_weights import (
    per_sample_weight_gradients_reference,
    per_sample_weight_gradients_triton,
)
from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from recfx.kernels.lookup.pooled_lookup_reference import pooled_lookup
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_reference, quantized_lookup_triton
from recfx.kernels.lookup.quantized_rows import BITS, quantize_rows
from recfx.kernels.route.bucketize import WHOLE, bucketize_reference, bucketize_triton
from recfx.kernels.route.select_keys import select_keys_reference, select_keys_triton
from recfx.kernels.step.fused_step import rules
from recfx.kernels.step.row_initialization import (
    init_rows_of_tables_reference_,
    init_rows_reference_,
    init_rows_triton_,
    initialization_key,
)
from recfx.optim.fused_step_op import fused_step_triton_, rules_in_triton, triton_module
from recfx.optim.rules import RULES

# A GPU fuses multiplications and additions, and its division and square root may be a bit off.
ON_A_DEVICE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ON_THE_CPU = ON_A_DEVICE | {torch.float32: 1e-5}


@dataclass(frozen=True)
class Call:
    """A kernel, called for a case."""

    name: str  # of the operator of namespace ``recfx``, perhaps with more after a colon
    operator: Callable[..., Any]
    reference: Callable[..., Any]  # returns, or changes, the tensors that the operator has to
    arguments: tuple[Any, ...]  # of both, on the CPU
    in_one_order: bool = True  # whether both add up in one order
    bytes: int = 0  # that have to be read and written; 0: its speed is not measured

    @property
    def kernel(self) -> str:
        """The Triton function of an operator in Triton."""
        return f"recfx_{self.name.partition('_triton')[0]}"

    def mismatch(self, device: torch.device) -> str:
        """What differs, in one line; ``""`` if nothing does."""
        on_device, on_host = moved(self.arguments, device), moved(self.arguments, torch.device("cpu"))
        actual, expected = self.operator(*on_device), self.reference(*on_host)
        return mismatch((actual, on_device), (expected, on_host), tolerances(device, self.in_one_order))

    def opcheck(self, device: torch.device, quick: bool) -> None:
        """Raise whatever ``torch.library.opcheck`` does; ``quick``: no compilation."""
        utilities = ("test_schema", "test_faketensor", *(() if quick else ("test_aot_dispatch_dynamic",)))
        operator = getattr(library.operators(), self.name.partition(":")[0]).default
        torch.library.opcheck(operator, moved(self.arguments, device), test_utils=utilities)


def check_all(device: torch.device, quick: bool) -> Iterator[Answer]:
    """Compare every kernel that can be run here with its reference, and run ``opcheck`` on its smallest case."""
    few = list(cases(quick))
    for in_triton, place in kernels_here(device):
        kernels = [*zip(*(calls_of(case, in_triton) for case in few), strict=True)]
        for calls in tqdm(kernels, unit="kernel", leave=False, disable=None):
            by_text = dict(zip(map(str, few), calls, strict=True))
            yield check(by_text, place, "device" if in_triton else "host", quick)


def check(calls: Mapping[str, Call], device: torch.device, where: str, quick: bool) -> Answer:
    """Whether a kernel is right; ``calls``: by the text of their case, the smallest first."""
    smallest = next(iter(calls.values()))
    outcomes = [(text, *attempt(partial(call.mismatch, device))) for text, call in calls.items()]
    wrong = [outcome for outcome in outcomes if outcome[1]]
    if wrong:
        return Answer(smallest.name, where, len(calls), len(wrong), *wrong[0])
    message, trace = attempt(lambda: smallest.opcheck(device, quick))
    return Answer(smallest.name, where, len(calls), message=message and f"opcheck: {message}", traceback=trace)


def kernels_here(device: torch.device) -> Iterator[tuple[bool, torch.device]]:
    """Whether in Triton, and where: the kernels that can be run."""
    if library.load():
        yield False, torch.device("cpu")
    if not launch.why_not(device):
        yield True, device


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
    """Absolute and relative, by dtype; 0 for all that are not listed, those in one order on the CPU among them."""
    return ON_A_DEVICE if device.type != "cpu" else {} if in_one_order else ON_THE_CPU


def mismatch(actual: Any, expected: Any, allowed: Mapping[torch.dtype, float]) -> str:
    """What differs between the tensors in ``actual`` and ``expected``, in one line; ``""`` if nothing does.

    Integers, shapes and dtypes have to be equal, numbers within ``allowed``: see ``tolerances``.
    """
    results, references = ([one for one in tree_leaves(of) if isinstance(one, Tensor)] for of in (actual, expected))
    if len(results) != len(references):
        return f"{len(results)} results instead of {len(references)}"
    for place, (one, other) in enumerate(zip(results, references, strict=True)):
        tolerance = allowed.get(other.dtype, 0.0)
        try:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True, check_device=False)
        except AssertionError as error:
            return f"result {place}: {' '.join(str(error).split())}"
    return ""


def moved(values: Any, device: torch.device) -> Any:
    """A copy of ``values``, with every tensor on the device in memory of its own."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), values)


def calls_of(case: LookupCase, in_triton: bool) -> Iterator[Call]:
    """Every kernel in Triton, or every one in C++."""
    yield from _lookups(case, in_triton)
    yield from _batches(case, in_triton)
    yield from _steps(case, in_triton)


def _lookups(case: LookupCase, in_triton: bool) -> Iterator[Call]:
    cpp: Any = library.operators()
    batch, features = (case.rows, case.offsets), case.table_of_feature
    triton, lookup, gradients = "", cpp.pooled_lookup, cpp.per_sample_weight_gradients
    if in_triton:
        triton, lookup, gradients = "_triton", pooled_lookup_triton, per_sample_weight_gradients_triton
    arguments: Any = (*batch, case.weights, features, case.are_means, case.weights_of_ids)
    yield Call(f"pooled_lookup{triton}", lookup, pooled_lookup, arguments, bytes=case.bytes_of_lookup())
    arguments = (case.rows[: case.borders[2]], case.borders[:3], case.weights[:1], [0, 0], False, None, True)
    unpooled = lookup if in_triton else lambda *all: torch.cat(lookup(*all))  # a tensor per feature
    yield Call(f"pooled_lookup{triton}: not pooled", unpooled, pooled_lookup, arguments)
    yield Call(
        f"per_sample_weight_gradients{triton}", gradients, per_sample_weight_gradients_reference,
        (*batch, case.gradients, case.weights, features), in_one_order=False, bytes=case.bytes_of_lookup(),
    )  # fmt: skip
    for bits, alignment in zip(BITS if in_triton else (), (1, 16) if case.seed % 2 else (16, 1), strict=in_triton):
        codes = [quantize_rows(weight.float(), bits, alignment) for weight in case.weights]
        arguments = (*batch, codes, case.dims, bits, features, False, case.scales)
        of_codes = (quantized_lookup_triton, quantized_lookup_reference, arguments)
        yield Call(f"quantized_lookup_triton: {bits} bits", *of_codes, bytes=case.bytes_of_lookup(bits))


def lookups_of_kinds(quick: bool) -> Iterator[tuple[str, Call]]:
    """By kind, a lookup that either form of target ``npu`` does, as the setting ``VENDOR`` says for its kind."""
    from recfx.ir.node_kinds import NOT_COMBINED  # kernels are checked without TorchRec, too

    for kind, (combine, dtype, dim) in tuned.KINDS_OF_LOOKUPS.items():
        if quick and dim != 64:
            continue
        # The tables are larger than the cache of the chip.
        case = LookupCase([dim] * 7, 16 if quick else 2048, dtype, rows=2 ** (12 if quick else 23) // dim, longest=20)
        bags, unpooled = (case.borders, True) if combine == NOT_COMBINED else (case.offsets, False)
        batch, how = (case.rows.clamp(min=0), bags), (case.table_of_feature, combine == "MEAN", None, unpooled)
        arguments = (*batch, case.borders.diff().tolist(), case.weights, *how)
        yield kind, Call(kind, partial(_look_up, kind), _look_up_reference, arguments)


def _look_up(kind: str, *arguments: Any) -> tuple[Tensor, ...]:
    from recfx.lowering.triton import target, vendor  # which need TorchRec

    form = vendor if tuned.number("", tuned.VENDOR, kind) else target
    return form.look_up(*arguments)


def _look_up_reference(rows: Tensor, offsets: Tensor, lengths: list[int], *how: Any) -> tuple[Tensor, ...]:
    output = pooled_lookup(rows, offsets, *how)
    return output.split(lengths) if how[-1] else (output,)


def _batches(case: LookupCase, in_triton: bool) -> Iterator[Call]:
    features, draw = range(len(case.table_of_feature)), torch.Generator().manual_seed(case.seed)
    # In turns, a table that is not cut, one whose ids are rows, and one with an index.
    turns: Any = (([], 0, 0, 0, 0), ([0, 4, 4, 10], 0, 10, 0, 0), ([0, 7, 20], 2, 20, 3, -(2**63)))
    borders, *facts = map(list, zip(*(turns[feature % 3] for feature in features), strict=True))
    outputs = [(feature, piece) for feature in features for piece in ([WHOLE], [0, 2, 1], [1, WHOLE, 0])[feature % 3]]
    ids = torch.randint(-(2**63), 2**63 - 1, (case.rows.numel(),), generator=draw)
    are_rows = torch.tensor([feature % 3 == 1 for feature in features]).repeat_interleave(case.borders.diff())
    ids = torch.where(are_rows, ids.remainder(10), ids)
    lists = (list(chain(*borders)), list(map(len, borders)), *facts, *map(list, zip(*outputs[::-1], strict=True)))
    route = bucketize_triton if in_triton else library.operators().bucketize
    arguments: Any = (ids, case.lengths, case.batch_size, *lists, case.weights_of_ids)
    traffic = 16 * ids.numel() + 24 * case.lengths.numel()
    yield Call("bucketize", route, bucketize_reference, arguments, bytes=traffic)
    if not in_triton:
        return
    yield Call("find_rows_triton", find_rows_triton, _find_rows, index_read(min(700, 100 * case.batch_size)))
    # Lengths, or offsets; with weights, an id that is no row of its table; and a key without a limit.
    rows, bags = case.rows.clamp(min=0), case.offsets if case.are_means else case.lengths
    rows[:1] = 0 if case.weights_of_ids is None else 2**40
    limits = [*(case.weights[table].shape[0] for table in case.table_of_feature[:-1]), -1]
    arguments = (rows, bags, case.are_means, [case.batch_size] * len(features), limits)
    yield Call("bag_offsets_triton", _bags(bag_offsets_triton), _bags(kernel_reference), arguments)
    positions = [len(case.dims), 0, len(case.dims), 1]
    count = int(case.borders.diff()[positions].sum())
    arguments = (case.rows, case.offsets, positions, case.batch_size, count, case.weights_of_ids)
    yield Call("select_keys_triton", select_keys_triton, select_keys_reference, arguments)


def _find_rows(ids: Tensor, ends: Tensor, *indexes: Tensor) -> tuple[Tensor, Tensor]:
    return find_rows_reference(ids, ends, ReadIndexes(*indexes))


def _bags(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Offsets, where each key's ids begin, and whether anything is wrong with the batch."""

    def call(*arguments: Any) -> list[Tensor]:
        offsets, reports = operator(*arguments)
        borders = len(arguments[3]) + 1
        return [offsets, reports[:borders], reports[borders:].any()]

    return call


def _steps(case: LookupCase, in_triton: bool) -> Iterator[Call]:
    cpp: Any = library.operators()
    count, draw = len(case.dims), torch.Generator().manual_seed(case.seed)
    # New rows of tables with two states, one and none.
    weights = [torch.zeros(9, dim, dtype=weight.dtype) for dim, weight in zip(case.dims, case.weights, strict=True)]
    first = [torch.full((9, 0 if table == 2 else dim), 7.0) for table, dim in enumerate(case.dims)]
    second = [torch.full((9, 1 if table == 0 else 0), 7.0) for table in range(count)]
    ids = torch.randint(-(2**63), 2**63 - 1, (5 * count,), generator=draw)
    rows = torch.cat([torch.randperm(9, generator=draw)[:5] for _ in case.dims])
    keys = [initialization_key(f"t{table}", 3) for table in range(count)]
    if in_triton:
        entries = torch.stack([rows, ids, torch.arange(count).repeat_interleave(5)], 1)
        ends = ([-0.5] * count, [0.25] * count, [0.5] * count, [0.0] * count)
        arguments: Any = (entries, weights, first, second, keys, list(range(count)), *ends)
        # Triton's interpreter truncates where bfloat16 is rounded.
        yield Call(
            "init_rows_triton_", init_rows_triton_, init_rows_of_tables_reference_, arguments, in_one_order=False
        )
    else:
        arguments = (weights[0], rows[:5], ids[:5], keys[0], -0.5, 0.25, 0)
        yield Call("init_rows_", cpp.init_rows_, init_rows_reference_, arguments)
    is_stepped = [not case.are_means or table != 1 for table in range(count)]
    step: Any = fused_step_triton_ if in_triton else cpp.fused_step_
    for rule in rules_in_triton() if in_triton else (rule for rule in RULES if rule.name in rules()):
        states = [[torch.rand(s.shape(*weight.shape), generator=draw) for weight in case.weights] for s in rule.states]
        tables = (case.weights, *(*states, [], [])[:2], case.table_of_feature, is_stepped)
        numbers = list(rule.step_numbers(STEPS, GROUP))
        if in_triton:
            of_rule: Any = (triton_module(rule), rule.has_row_state, numbers, case.are_means, None)
        else:
            of_rule = (rule.name, numbers * count, case.are_means, None, None)
        yield Call(
            f"fused_step_{'triton_' if in_triton else ''}: {rule.name}",
            step, partial(step_, rule, GROUP, case.are_means),
            (case.rows, case.offsets, case.gradients if in_triton else [case.gradients], *tables, *of_rule),
            in_one_order=False, bytes=case.bytes_of_step(rule),
        )  # fmt: skip
