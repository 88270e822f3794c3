"""Where a training step spends its time, node by node: measured by torch.profiler, and predicted by recfx.cost.

    python examples/profile_step.py                     # a DLRM with 26 hashed tables
    python examples/profile_step.py --trace step.json   # also for https://ui.perfetto.dev or chrome://tracing
    python examples/profile_step.py --smoke             # small and short

The ranges of the profile have the names of the graph's nodes, so that a trace, the graph and the report speak of the
same things: ``<node>`` is its forward, ``<node> (backward)`` its backward, and ``<node> (step)`` the fused step of the
optimizers of its tables.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
from pathlib import Path

import torch
from criteo import CATEGORICAL, DENSE, Rows
from dlrm import build_dlrm
from torch.profiler import ProfilerActivity, profile
from torchrec.models.dlrm import DLRM

import recfx

PARTS = ("", " (backward)", " (step)")
LINE = "{:<55} {:>11} {:>11} {:>11} {:>11} {:>11} {:>6}"


def main() -> int:
    options = parse_arguments()
    torch.manual_seed(0)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    model = recfx.convert(build_dlrm(options), hashing=recfx.HashConfig.raw_ids()).train()
    known = options.rows // 2  # first every id gets its row, so that the measured steps are alike
    for begin in range(0, known, options.batch_size):
        ids = torch.arange(begin, begin + options.batch_size) % known
        step(model, rows_of(ids[:, None].expand(-1, len(CATEGORICAL))))
    random = [torch.randint(known, (options.batch_size, len(CATEGORICAL))) for _ in range(options.steps)]
    predicted = recfx.cost(model).at(B=options.batch_size, L=1)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for ids in random:
            step(model, rows_of(ids))
    if options.trace is not None:
        profiled.export_chrome_trace(str(options.trace))
        print(f"{options.trace}: open it in https://ui.perfetto.dev")
    print(f"a step of {options.batch_size:,} samples on this machine")
    print(f"measured: the fastest quarter of {options.steps} steps, which other processes disturb least")
    print(f"predicted: by recfx.cost for {predicted.hardware.label}\n")
    print(LINE.format("node", "forward", "backward", "step", "measured", "predicted", "ratio"))
    measured = times_of_ranges(profiled)
    nodes = [node for node in predicted.nodes if node.kind != "dense"]  # the dense part is not one range
    lines = [(node.name, [measured.get(node.name + part, 0.0) for part in PARTS], node.seconds) for node in nodes]
    total = [sum(times) for times in zip(*(parts for _, parts, _ in lines), strict=True)]
    for name, parts, seconds in (*lines, ("all of these", total, sum(node.seconds for node in nodes))):
        ratio = f"{sum(parts) / seconds:.2f}" if seconds else ""  # a node that only names things is free
        print(LINE.format(name, *map(in_ms, (*parts, sum(parts), seconds)), ratio).rstrip())
    print("\nthe profiler itself adds some time to each")
    return 0 if all(node.name in measured for node in nodes) else 1


def times_of_ranges(profiled: profile) -> dict[str, float]:
    """Seconds per step of every range, by its name."""
    times: dict[str, list[float]] = {}
    for event in profiled.events():
        times.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    return {name: statistics.median(sorted(steps)[: max(1, len(steps) // 4)]) for name, steps in times.items()}


def rows_of(ids: torch.Tensor) -> Rows:
    """Samples with these ids ``[n, 26]``, far apart."""
    count = len(ids)
    return Rows(torch.zeros(count), torch.rand(count, len(DENSE)), ids * 2_654_435_761, torch.ones_like(ids).bool())


def step(model: DLRM, batch: Rows) -> None:
    """One step of the tables; the dense part gets gradients, and no step."""
    model.zero_grad()
    model(*batch.model_input(torch.device("cpu"))).sum().backward()


def in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, help="write the profile as a file for Perfetto")
    parser.add_argument("--smoke", action="store_true", help="small and short, only to see that everything runs")
    parser.add_argument("--steps", type=int, default=20, help="measured steps (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1024, help="(default %(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each table (default %(default)s)")
    parser.add_argument("--dim", type=int, default=32, help="columns of each table (default %(default)s)")
    options = parser.parse_args()
    options.device = torch.device("cpu")
    if options.smoke:
        options.steps, options.batch_size, options.rows, options.dim = 2, 64, 1000, 8
    return options


if __name__ == "__main__":
    sys.exit(main())
