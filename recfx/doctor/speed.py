"""How fast the kernels are here, as a share of what a copy moves, and which launch settings are best for each."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from recfx.doctor.checks import attempt
from recfx.doctor.machine import name_of
from recfx.doctor.report import Answer, Choice, Finding, Report, Speed, Status
from recfx.kernels.build import launch, library, tuned
from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients_triton
from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_triton
from recfx.kernels.lookup.quantized_rows import quantize_rows
from recfx.kernels.route.bucketize import Routes, bucketize_triton
from recfx.optim.fused_step_op import fused_step_triton_, rules_in_triton, triton_module
from recfx.optim.rules.rule import Rule

CANDIDATES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    tuned.PROGRAMS_PER_CORE: {"npu": (1, 2, 4), "cuda": (32, 8, 16, 64)},
    tuned.ROWS_IN_FLIGHT: {"npu": (32, 16, 8), "cuda": (8, 16, 32)},
}
"""Programs of a kernel that share a core, and rows for which a lookup asks at a time; the default first."""

WORTH = 0.97
"""Another number than the default has to take at most this share of its time."""

MOST_SECONDS = 2.0
"""After which no further repeat begins."""

_AHEAD = 64 << 20  # bytes of a copy that the device is busy with while the host launches what is measured
_GROUP = {"lr": 0.0625, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.0}


def measure(report: Report, device: torch.device) -> None:
    """Measure one thing after the other into the report, until one fails; then choose the settings of launches."""
    size = size_for(device, report.quick)
    report.workload = str(size)
    workload = Workload(device, size)
    measured = [workload.copy()]

    def measure_all() -> None:
        for call in tqdm(chain(measured[:1], workload.calls()), unit="measured", leave=False, disable=None):
            measured.append(call)
            milliseconds = median_ms(call.run, device, report.quick)
            copy = report.speeds[0] if report.speeds else Speed("copy", milliseconds, call.bytes, 1.0)
            share = call.bytes / milliseconds * copy.milliseconds / copy.bytes
            report.speeds.append(Speed(call.name, milliseconds, call.bytes, share))
        if device.type != "cpu":
            _tune(report, device, measured[1:])

    message, trace = attempt(measure_all)
    if message:
        where = f"measuring: {measured[-1].name}"
        report.answers.append(Answer(where, "device", 1, 1, report.workload, message, trace))


def _tune(report: Report, device: torch.device, measured: Sequence[Measured]) -> None:
    kept: dict[str, dict[str, int]] = {}
    with contextlib.ExitStack() as chosen:  # what is chosen for one setting is in use while the next is tried
        for setting, call in product(CANDIDATES, measured):
            if call.kernel in tuned.ALLOWED[setting]:
                choice = best_of(call, setting, device, report.quick)
                report.choices.append(choice)
                kept.setdefault(setting, {})[call.kernel] = choice.chosen
                chosen.enter_context(tuned.trying(setting, call.kernel, choice.chosen))
    if kept and not report.quick:
        try:
            path = tuned.keep(name_of(device), kept)
            report.choices = [replace(choice, kept_in=str(path)) for choice in report.choices]
        except OSError as error:
            advice = "set RECFX_BUILD_DIR to a directory of your own that nobody else can write to"
            text = f"what is fastest cannot be kept: {error}"
            report.findings.append(Finding("tuned.json", Status.WARNING, text, advice))


def best_of(call: Measured, setting: str, device: torch.device, quick: bool) -> Choice:
    """Try each number of a setting, and choose the fastest if it is worth it."""
    candidates = CANDIDATES[setting][device.type]
    times = {}
    for number in candidates:
        with tuned.trying(setting, call.kernel, number):
            times[number] = median_ms(call.run, device, quick)
    default, best = candidates[0], min(candidates, key=times.__getitem__)
    chosen = best if times[best] <= WORTH * times[default] else default
    return Choice(f"{setting.replace('_', ' ')} of {call.kernel}", times, chosen)


def median_ms(run: Callable[[], object], device: torch.device, quick: bool) -> float:
    """Milliseconds: the median of some calls, after some that are not counted.

    On a device, a copy runs before each, so that the host is ahead with its launches: what is measured is the device.
    """
    repeats, warm_up = (3, 1) if quick else (15, 3)
    timed = _on_host(run) if device.type == "cpu" else _on_device(run, device)
    gc.collect()
    for _ in range(warm_up):
        timed()
    end, milliseconds = time.perf_counter() + MOST_SECONDS, [timed()]
    while len(milliseconds) < repeats and time.perf_counter() < end:
        milliseconds.append(timed())
    return statistics.median(milliseconds)


def _on_host(run: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3

    return timed


def _on_device(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    module = torch.get_device_module(device)
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    source = torch.zeros(_AHEAD, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def timed() -> float:
        target.copy_(source)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return timed


class Size(NamedTuple):
    """How large the tables are, which are all alike, and a batch."""

    tables: int
    rows: int
    dim: int
    batch: int
    bag_length: int
    copied: int  # bytes of a copy, many times a cache

    def __str__(self) -> str:
        return (
            f"{self.tables} tables of {self.rows:,} rows, dim {self.dim}, float32, batch {self.batch:,}, "
            f"{self.bag_length} ids per bag, uniform"
        )


def size_for(device: torch.device, quick: bool) -> Size:
    """As large as the README's on a device; a CPU gets fewer tables."""
    if quick:
        return Size(4, 20_000, 64, 512, 10, 16 << 20)
    if device.type == "cpu":
        return Size(8, 100_000, 64, 2048, 10, 64 << 20)
    return Size(26, 100_000, 64, 2048, 10, 1 << 29)


@dataclass(frozen=True)
class Measured:
    """One call.

    Args:
        name: as it is shown.
        bytes: that it has to read and write.
        run: does it.
        kernel: the Triton function behind it, if something may be chosen for it.
    """

    name: str
    bytes: int
    run: Callable[[], object]
    kernel: str = ""


class Workload:
    """Tables and a batch on a device."""

    def __init__(self, device: torch.device, size: Size) -> None:
        self.device, self.size = device, size
        draw = torch.Generator().manual_seed(0)
        self.weights = [torch.rand(size.rows, size.dim, device=device) for _ in range(size.tables)]
        self.count = size.tables * size.batch * size.bag_length
        self.rows = torch.randint(0, size.rows, (self.count,), generator=draw).to(device)
        self.offsets = torch.arange(0, self.count + 1, size.bag_length).to(device)
        self.features = list(range(size.tables))
        self.gradients = torch.rand(size.batch, size.tables * size.dim, device=device)
        self.scales = torch.rand(self.count, device=device)
        of_tables = self.rows.view(size.tables, -1)
        self.touched = sum(own.cpu().unique().numel() for own in of_tables)

    def copy(self) -> Measured:
        """What all others are compared with."""
        source = torch.zeros(self.size.copied, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return Measured("copy", 2 * self.size.copied, lambda: target.copy_(source))

    def calls(self) -> Iterator[Measured]:
        """Everything else, the lookups first."""
        row = 4 * self.size.dim
        table, rows = self.weights[0], self.rows
        yield Measured("gather (index_select)", self.count * (8 + 2 * row), lambda: table.index_select(0, rows))
        in_triton = not launch.why_not(self.device)
        if in_triton or (self.device.type == "cpu" and library.load()):
            yield from self._lookups(in_triton, row)
            yield from self._steps(in_triton, row)

    def _lookups(self, in_triton: bool, row: int) -> Iterator[Measured]:
        pooled, bags = self.count * (8 + row), 8 * self.offsets.numel() + self.size.tables * self.size.batch * row
        operators: Any = library.operators()
        lookup = pooled_lookup_triton if in_triton else operators.pooled_lookup
        batch, tables = (self.rows, self.offsets), (self.weights, self.features)
        yield Measured(
            "pooled lookup",
            pooled + bags,
            lambda: lookup(*batch, *tables, False, None),
            "recfx_pooled_lookup",
        )
        gradients = per_sample_weight_gradients_triton if in_triton else operators.per_sample_weight_gradients
        yield Measured(
            "gradients of weights of ids", pooled + bags + 4 * self.count,
            lambda: gradients(*batch, self.gradients, *tables), "recfx_per_sample_weight_gradients",
        )  # fmt: skip
        if in_triton:
            codes = [quantize_rows(weight.cpu(), 8, 16).to(self.device) for weight in self.weights]
            dims = [self.size.dim] * self.size.tables
            yield Measured(
                "quantized lookup, int8", self.count * (8 + codes[0].shape[1]) + bags,
                lambda: quantized_lookup_triton(*batch, codes, dims, 8, self.features, False, None),
                "recfx_quantized_lookup",
            )  # fmt: skip
        yield self._routes(in_triton)

    def _routes(self, in_triton: bool) -> Measured:
        """Two pieces of every table."""
        size, number = self.size, self.size.tables
        half = [0, size.rows // 2, size.rows]
        pieces = list(chain.from_iterable((place, place) for place in range(number)))
        zeros = [0] * number
        routes = Routes([half] * number, zeros, [size.rows] * number, zeros, zeros, pieces, [0, 1] * number)
        lists = (half * number, [3] * number, *routes[1:])
        operator: Any = bucketize_triton if in_triton else library.operators().bucketize
        lengths = self.offsets.diff()
        return Measured(
            "ids routed to two ranks", 16 * self.count + 24 * lengths.numel(),
            lambda: operator(self.rows, lengths, size.batch, *lists, None),
        )  # fmt: skip

    def _steps(self, in_triton: bool, row: int) -> Iterator[Measured]:
        for rule in rules_in_triton():
            state = sum(4 if kind.per_row else row for kind in rule.states)
            moved = self.count * (8 + row) + 2 * self.touched * (row + state)
            yield Measured(f"fused step, {rule.name}", moved, self._step(rule, in_triton))

    def _step(self, rule: Rule, in_triton: bool) -> Callable[[], object]:
        weights = [weight.clone() for weight in self.weights]
        states = [
            [torch.zeros(state.shape(*weight.shape), device=self.device) for weight in weights] for state in rule.states
        ]
        first, second = (*states, [], [])[:2]
        numbers = list(rule.step_numbers(1.0, _GROUP))
        tables: Any = (weights, first, second, self.features, [True] * len(weights))
        if in_triton:
            of_rule = (triton_module(rule), rule.has_row_state, numbers)
            batch = (self.rows, self.offsets, self.gradients)
            return lambda: fused_step_triton_(*batch, *tables, *of_rule, False, None)
        per_table = numbers * len(weights)
        of_outputs = (self.rows, self.offsets, [self.gradients])
        return lambda: library.operators().fused_step_(*of_outputs, *tables, rule.name, per_table, False, None, None)
