"""Runs contestants in turn, computes medians, and defines the format of a result."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.bench.setup import Setup


@dataclass(frozen=True)
class Contestant:
    """Something to time.

    Args:
        name: as printed.
        run: called with the number of the iteration.
        every: take part only in every n-th iteration, for slow contestants.
        before: called with the number, too, before each run; not timed.
    """

    name: str
    run: Callable[[int], object]
    every: int = 1
    before: Callable[[int], object] = lambda _: None


@dataclass(frozen=True)
class Result:
    """Two contestants' medians.

    Args:
        name: name of the case, ``benchmark/case``.
        ours: which of our contestants it is.
        ours_ms: its median.
        peer: what it is compared with.
        peer_ms: the median of the peer.
        quiet_ratio: the ratio over the fastest quarter of each one's iterations, which other processes disturb least.
        spread: first and third quartile of the ratios of single iterations, which show how noisy the machine is.
        setup: everything that is needed to interpret the numbers.
    """

    name: str
    ours: str
    ours_ms: float
    peer: str
    peer_ms: float
    quiet_ratio: float
    spread: tuple[float, float]
    setup: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Ours over the peer: below 1, ours is faster."""
        return self.ours_ms / self.peer_ms

    def to_json(self) -> dict[str, Any]:
        """Flat, the same keys for every benchmark first."""
        return {
            "name": self.name,
            "ours": self.ours,
            "ours_ms": round(self.ours_ms, 4),
            "peer": self.peer,
            "peer_ms": round(self.peer_ms, 4),
            "ratio": round(self.ratio, 4),
            "quiet_ratio": round(self.quiet_ratio, 4),
            "ratio_quartiles": [round(value, 4) for value in self.spread],
            **self.setup,
        }

    def __str__(self) -> str:
        low, high = self.spread
        # Other processes were at work: the ratio of the fastest quarter says more than that of the medians.
        noise = "  NOISY" if high > 1.25 * low else ""
        return (
            f"  {self.ours:<28} {self.ours_ms:9.2f} ms   {self.peer:<28} {self.peer_ms:9.2f} ms   "
            f"ratio {self.ratio:6.3f}   "
            f"(fastest quarter {self.quiet_ratio:.3f}, quartiles {low:.3f} to {high:.3f}){noise}"
        )


class CannotRun(Exception):
    """Raised by a benchmark that lacks something on this machine, with a sentence that says what."""


Times = dict[str, dict[int, float]]
"""Milliseconds, by contestant and iteration."""

Clock = Callable[[Callable[[], object]], float]
"""Calls a function, and tells how many milliseconds it took."""


def wall_clock(function: Callable[[], object]) -> float:
    """The time until the call returns."""
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


def take_turns(contestants: Sequence[Contestant], iterations: int, warm_up: int, clock: Clock = wall_clock) -> Times:
    """Time every contestant on every iteration, A B A B.

    The first contestant changes from one iteration to the next, so that what one leaves in the caches helps all others
    equally.

    Args:
        contestants: each runs iteration ``i`` on the same ids.
        iterations: how many are timed.
        warm_up: iterations before those, which are not timed; they have their own numbers.
        clock: what times an iteration.
    """
    times: Times = {contestant.name: {} for contestant in contestants}
    with _no_garbage_collection():
        for iteration in range(warm_up + iterations):
            first = iteration % len(contestants)
            for contestant in (*contestants[first:], *contestants[:first]):
                if iteration >= warm_up and (iteration - warm_up) % contestant.every:
                    continue
                contestant.before(iteration)
                elapsed = clock(partial(contestant.run, iteration))
                if iteration >= warm_up:
                    times[contestant.name][iteration] = elapsed
    return times


def must_agree(contestants: Sequence[Contestant], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Check the results of all on the last batch: to time wrong results would be pointless."""
    expected = contestants[0].run(-1)
    for contestant in contestants[1:]:
        torch.testing.assert_close(
            contestant.run(-1), expected, rtol=rtol, atol=atol, msg=lambda text, name=contestant.name: f"{name}: {text}"
        )


def compare_all(
    name: str,
    contestants: Sequence[Contestant],
    setup: Setup,
    facts: dict[str, Any],
    pairs: Sequence[tuple[str, str]] = (),
) -> Iterator[Result]:
    """Let the contestants take turns, and compare pairs of them: by default, the first one with each other one."""
    times = take_turns(contestants, setup.iterations, setup.warm_up)
    for ours, peer in pairs or [(contestants[0].name, other.name) for other in contestants[1:]]:
        yield compare(name, times, ours, peer, facts)


def compare(name: str, times: Times, ours: str, peer: str, setup: dict[str, Any]) -> Result:
    """The result of two contestants, on the iterations that both ran."""
    both = sorted(times[ours].keys() & times[peer].keys())
    our_times, peer_times = ([times[who][iteration] for iteration in both] for who in (ours, peer))
    ratios = [mine / other for mine, other in zip(our_times, peer_times, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Result(
        name=name,
        ours=ours,
        ours_ms=statistics.median(our_times),
        peer=peer,
        peer_ms=statistics.median(peer_times),
        quiet_ratio=of_fastest_quarter(our_times) / of_fastest_quarter(peer_times),
        spread=(quartiles[0], quartiles[2]),
        setup={**setup, "iterations": len(both)},
    )


def of_fastest_quarter(times: list[float]) -> float:
    return statistics.median(sorted(times)[: max(1, len(times) // 4)])


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
