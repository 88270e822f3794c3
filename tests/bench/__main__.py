"""``python -m tests.bench [name ...] [--json] [--quick]``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import replace

import torch

from tests.bench import BENCHMARKS, BY_THREADS
from tests.bench.harness import Result
from tests.bench.workload import QUICK, Setup


def main(arguments: list[str] | None = None) -> int:
    """Run the named benchmarks, or all; return 0 unless one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--json", action="store_true", help="print one object per line and nothing else")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], metavar="N",
        help=f"torch's threads (default 1 2: {', '.join(BY_THREADS)} run with one, then with two; the others with two)",
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, help="timed iterations")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    size = QUICK if options.quick else Setup()
    if options.iterations is not None:
        size = replace(size, iterations=options.iterations)

    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    try:
        for name in options.names or BENCHMARKS:
            for number in options.threads if name in BY_THREADS else options.threads[-1:]:
                torch.set_num_threads(number)
                torch.manual_seed(0)
                heading: tuple[object, ...] = ()
                for result in BENCHMARKS[name](replace(size, threads=number)):
                    if options.json:
                        print(json.dumps(result.to_json()), flush=True)
                    else:
                        heading = _print(result, heading)
    finally:
        torch.set_num_threads(threads)
    return 0


def _print(result: Result, heading: tuple[object, ...]) -> tuple[object, ...]:
    """One line, below a heading with the setup wherever that changes."""
    setup = result.setup
    threads = f"{setup['threads']} thread{'s' if setup['threads'] != 1 else ''}"
    wanted = (result.name, *(setup[key] for key in ("tables", "rows", "dim", "batch", "ids")))
    if wanted != heading:
        fixed = {"tables", "rows", "dim", "batch", "bag_length", "ids", "threads", "iterations", "seconds", "growth"}
        how = "medians" if "seconds" in setup else "medians, fresh ids every iteration"
        others = "".join(f", {key} {value}" for key, value in setup.items() if key not in fixed)
        print(
            f"\n{result.name}: {setup['tables']:,} tables, {setup['rows']:,} rows, dim {setup['dim']}, batch "
            f"{setup['batch']:,}, {setup['bag_length']} ids per bag, {setup['ids']} ids, "
            f"{threads}{others}; {how}"
        )
    print(result, flush=True)
    if "seconds" in setup:
        growth = f", {setup['growth']} times the model of half the size" if "growth" in setup else ""
        print(f"  converted in {setup['seconds']} s{growth}", flush=True)
    return wanted


if __name__ == "__main__":
    sys.exit(main())
