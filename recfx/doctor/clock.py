"""The median time of a call, on the device's own clock where it has one."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

REPEATS, WARM_UP = 15, 3
QUICK_REPEATS, QUICK_WARM_UP = 3, 1
MOST_SECONDS = 2.0
"""After which no further repeat begins."""

_AHEAD = 64 << 20  # bytes of a copy that the device is busy with while the host launches what is measured


def median_ms(run: Callable[[], object], device: torch.device, quick: bool) -> float:
    """Milliseconds: the median of some calls, after some that are not counted.

    On a device, a copy runs before each, so that the host is ahead with its launches: what is measured is the device.
    """
    repeats, warm_up = (QUICK_REPEATS, QUICK_WARM_UP) if quick else (REPEATS, WARM_UP)
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
