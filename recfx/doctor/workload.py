"""What is measured: calls on tables and a batch of one size, with the bytes that each has to read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from recfx.kernels.build import launch, library
from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients_triton
from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_triton
from recfx.kernels.lookup.quantized_rows import quantize_rows
from recfx.kernels.route.bucketize import Routes, bucketize_triton
from recfx.optim.fused_step_op import fused_step_triton_, rules_in_triton, triton_module
from recfx.optim.rules.rule import Rule

GROUP = {"lr": 0.0625, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.0}


@dataclass(frozen=True)
class Size:
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
        numbers = list(rule.step_numbers(1.0, GROUP))
        tables: Any = (weights, first, second, self.features, [True] * len(weights))
        if in_triton:
            of_rule = (triton_module(rule), rule.has_row_state, numbers)
            batch = (self.rows, self.offsets, self.gradients)
            return lambda: fused_step_triton_(*batch, *tables, *of_rule, False, None)
        per_table = numbers * len(weights)
        of_outputs = (self.rows, self.offsets, [self.gradients])
        return lambda: library.operators().fused_step_(*of_outputs, *tables, rule.name, per_table, False, None, None)
