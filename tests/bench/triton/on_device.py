"""What the benchmarks of kernels in Triton share: the device, its clock, the bandwidth of a copy, tables and ids."""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from recfx.kernels.build import launch
from tests.bench.harness import CannotRun, Clock, Contestant, Result, compare, take_turns, wall_clock
from tests.bench.setup import QUICK, Ids, Setup, embedding_bags
from tests.support import without_torchrec

OURS, TORCH, FBGEMM = "kernel in Triton", "F.embedding_bag a table", "FBGEMM on the device"
_COPIED = 2**30  # bytes: many times the largest cache
_AHEAD = 5_000_000  # cycles that the device waits: the host launches in the meantime
_TOLERANCE = 1e-4  # for sums of tens of numbers in any order
_WIDTHS = (16, 32, 64, 128, 256, 512)


def sized(setup: Setup) -> Setup:
    """The setup for a device: larger tables and batches than a CPU's, or, in the interpreter, as small as can be.

    Raises:
        CannotRun: there is no such device, or no Triton for it.
    """
    device = torch.device(setup.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CannotRun(f"the kernels in Triton need a CUDA device, and torch {torch.__version__} sees none.")
    why_not = launch.why_not(device)
    if why_not:
        raise CannotRun(f"the kernels in Triton cannot be launched: {why_not}")
    if device.type == "cpu":
        return replace(setup, tables=2, rows=20, dim=8, batch=2, bag_length=3, iterations=1, warm_up=1)
    if setup.rows == QUICK.rows:
        return setup
    return replace(setup, rows=500_000, dim=128, batch=8192, iterations=min(20, setup.iterations), warm_up=5)


def clock_of(device: torch.device) -> Clock:
    """Milliseconds on the device; of the host, in the interpreter."""
    if device.type != "cuda":
        return wall_clock
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(function: Callable[[], object]) -> float:
        torch.cuda._sleep(_AHEAD)
        begin.record()
        function()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return timed


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per millisecond that a copy reads and writes: the median of twenty."""
    count = _COPIED if device.type == "cuda" else 2**20
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target, clock = torch.empty_like(source), clock_of(device)
    times = [clock(lambda: target.copy_(source)) for _ in range(25)][5:]
    return 2 * count / statistics.median(times)


def has_fbgemm(device: torch.device, operator: str = "fbgemm::asynchronous_complete_cumsum") -> bool:
    """Whether FBGEMM is installed, with a kernel of this operator for the device."""
    if without_torchrec.prepare():
        return False
    import fbgemm_gpu  # noqa: F401  (loads the operators)

    key = "CUDA" if device.type == "cuda" else "CPU"
    known = operator in torch._C._dispatch_get_all_op_names()
    return known and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


class Workload:
    """Tables on the device, and a new batch of ids for every iteration; ``[-1]`` is for checks.

    Args:
        setup: what ``sized`` gave back.
        distribution: of the ids.
    """

    def __init__(self, setup: Setup, distribution: str) -> None:
        self.setup, self.distribution, self.device = setup, distribution, torch.device(setup.device)
        ids = Ids(setup, distribution)
        self.ids = [values.to(self.device) for values in ids.values]
        self.offsets = ids.offsets.to(self.device)
        self.bags = self.offsets[: setup.batch + 1]
        self.features = list(range(setup.tables))
        self.dims, self.columns = [setup.dim] * setup.tables, f"{setup.dim}_columns"
        self.count = setup.tables * setup.batch * setup.bag_length

    def of_widths(self) -> Iterator[Workload]:
        """Yields the same ids for rows of every width, and for tables of all widths in one launch."""
        all_widths = _WIDTHS if self.device.type == "cuda" else _WIDTHS[:: len(_WIDTHS) - 1]
        for widths in (*([width] for width in all_widths), all_widths):
            other = copy.copy(self)
            other.dims = [widths[table % len(widths)] for table in self.features]
            other.columns = "mixed_columns" if len(widths) > 1 else f"{widths[0]}_columns"
            yield other

    def tables(self) -> list[torch.Tensor]:
        """The same numbers every time, in memory of their own."""
        draw, rows = torch.Generator(self.device).manual_seed(3), self.setup.rows
        return [torch.rand(rows, dim, generator=draw, device=self.device) - 0.5 for dim in self.dims]

    def by_table(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A batch's ids, or what belongs to them, of each table."""
        return values.split(self.setup.batch * self.setup.bag_length)

    def embedding_bags(
        self, i: int, weights: list[torch.Tensor], scales: Sequence[torch.Tensor] = (), **options: Any
    ) -> list[torch.Tensor]:
        """The sums of each table, by torch."""
        return embedding_bags(self.by_table(self.ids[i]), weights, self.bags, scales, **options)

    def gradients(self) -> torch.Tensor:
        """``[B, sum D]``, multiples of 1/16."""
        draw = torch.Generator(self.device).manual_seed(2)
        shape = (self.setup.batch, sum(self.dims))
        return torch.randint(-8, 9, shape, generator=draw, device=self.device) / 16

    def touched(self) -> int:
        """How many rows one batch reads, each counted once."""
        return sum(values.unique().numel() for values in self.by_table(self.ids[-1]))


def race(
    name: str,
    workload: Workload,
    contestants: Sequence[Contestant],
    bytes_moved: int,
    tolerance: float | Mapping[str, float] = _TOLERANCE,
    **facts: Any,
) -> Iterator[Result]:
    """Check that all agree on the last batch, let them take turns, and compare the first with each other one.

    Args:
        name: of the case.
        workload: what they run on.
        contestants: ours first; on the last batch, each gives back what is compared, if that is the same for all. A
            peer that cannot run is left out, with a line on standard error.
        bytes_moved: by one iteration.
        tolerance: absolute and relative; by peer, where they differ.
        facts: printed with the numbers.
    """
    setup, device = workload.setup, workload.device
    ours, *peers = contestants
    ours.before(-1)
    expected, able = ours.run(-1), [ours]
    for peer in peers:
        try:
            peer.before(-1)
            answer = peer.run(-1)
        except (RuntimeError, TypeError, AttributeError, AssertionError) as error:  # it refuses, or is another version
            print(f"{name}: {peer.name} cannot run: {error}", file=sys.stderr, flush=True)
            continue
        if answer is not None:
            close = tolerance if isinstance(tolerance, float) else tolerance.get(peer.name, _TOLERANCE)
            _check(f"{name}, {peer.name}", answer, expected, close)
        able.append(peer)
    times = take_turns(able, setup.iterations, setup.warm_up, clock_of(device))
    copied = copy_bandwidth(device)
    for peer in able[1:]:
        widths = set(workload.dims)
        of_case = {**setup.facts(workload.distribution), "dim": widths.pop() if len(widths) == 1 else "mixed", **facts}
        result = compare(name, times, ours.name, peer.name, of_case)
        for who, milliseconds in (("ours", result.ours_ms), ("peer", result.peer_ms)):
            speed = bytes_moved / milliseconds
            result.setup[f"{who}_gb_s"] = round(speed / 1e6, 4)
            result.setup[f"{who}_share_of_copy"] = round(speed / copied, 4)
        yield replace(result, setup={**result.setup, **machine(device), "copy_gb_s": round(copied / 1e6, 4)})


def _check(what: str, actual: object, expected: object, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def machine(device: torch.device) -> dict[str, Any]:
    """What it ran on."""
    import triton

    on = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, interpreted: measures nothing"
    return {"device": on, "torch": torch.__version__, "triton": triton.__version__}
