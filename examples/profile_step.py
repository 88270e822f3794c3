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
from collections.abc import Sequence
from pathlib import Path

import torch
from criteo import CATEGORICAL, DENSE
from torch.profiler import ProfilerActivity, profile
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recfx

PARTS = ("", " (backward)", " (step)")


def main() -> int:
    options = parse_arguments()
    torch.manual_seed(0)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    model = recfx.convert(build_model(options), hashing=recfx.HashConfig(dense_rows=0)).train()
    known = options.rows // 2  # first every id gets its row, so that the measured steps are alike
    for begin in range(0, known, options.batch_size):
        ids = torch.arange(begin, begin + options.batch_size) % known
        step(model, *make_batch(options, ids.repeat(len(CATEGORICAL))))
    batches = [make_batch(options) for _ in range(options.steps)]
    predicted = recfx.cost(model).at(B=options.batch_size, L=1)  # measures this machine, before it has other work
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for batch in batches:
            step(model, *batch)
    if options.trace is not None:
        profiled.export_chrome_trace(str(options.trace))
        print(f"{options.trace}: open it in https://ui.perfetto.dev")
    measured = times_of_ranges(profiled)
    print(f"a step of {options.batch_size:,} samples on {predicted.hardware.name}")
    print(f"measured: the fastest quarter of {options.steps} steps, which other processes disturb least")
    print("predicted: by recfx.cost, from constants of this machine\n")
    rows = [["node", "forward", "backward", "step", "measured", "predicted", "measured/predicted"]]
    total = predicted_total = 0.0
    for node in predicted.nodes:
        parts = [measured.get(node.name + part, 0.0) for part in PARTS]
        if not sum(parts):
            continue  # the dense part, which is not one range
        total, predicted_total = total + sum(parts), predicted_total + node.seconds
        ratio = f"{sum(parts) / node.seconds:.2f}" if node.seconds else ""  # a node that only names things is free
        rows.append([node.name, *map(in_ms, (*parts, sum(parts), node.seconds)), ratio])
    rows.append(["all of these", "", "", "", in_ms(total), in_ms(predicted_total), f"{total / predicted_total:.2f}"])
    show(rows)
    found = len(rows) - 2
    print(f"\n{found} nodes were measured; the profiler itself adds some time to each")
    return 0 if found == sum(node.kind != "dense" for node in predicted.nodes) else 1


def times_of_ranges(profiled: profile) -> dict[str, float]:
    """Seconds per step of every range, by its name."""
    times: dict[str, list[float]] = {}
    for event in profiled.events():
        times.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    return {name: statistics.median(sorted(found)[: max(1, len(found) // 4)]) for name, found in times.items()}


def build_model(options: argparse.Namespace) -> DLRM:
    """The user's model, which knows nothing about recfx."""
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"table_{feature}", num_embeddings=options.rows, embedding_dim=options.dim, feature_names=[feature]
            )
            for feature in CATEGORICAL
        ]
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
    return DLRM(collection, len(DENSE), [64, options.dim], [64, 1])


def make_batch(options: argparse.Namespace, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """One id per feature and sample, far apart; by default random ones, half as many different ones as rows."""
    count = len(CATEGORICAL) * options.batch_size
    ids = torch.randint(0, options.rows // 2, (count,)) if ids is None else ids
    kjt = KeyedJaggedTensor(list(CATEGORICAL), ids * 2_654_435_761, lengths=torch.ones(count, dtype=torch.int64))
    return torch.rand(options.batch_size, len(DENSE)), kjt


def step(model: DLRM, dense: torch.Tensor, kjt: KeyedJaggedTensor) -> None:
    """One step of the tables; the dense part gets gradients, and no step."""
    model.zero_grad()
    model(dense, kjt).sum().backward()


def in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds else ""


def show(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, help="write the profile as a file for Perfetto")
    parser.add_argument("--smoke", action="store_true", help="small and short, only to see that everything runs")
    parser.add_argument("--steps", type=int, default=20, help="measured steps (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1024, help="(default %(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each table (default %(default)s)")
    parser.add_argument("--dim", type=int, default=32, help="columns of each table (default %(default)s)")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.batch_size, options.rows, options.dim = 2, 64, 1000, 8
    return options


if __name__ == "__main__":
    sys.exit(main())
