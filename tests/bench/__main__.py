"""``python -m tests.bench [name ...] [--json] [--quick]``.

Exit status: 0 if all benchmarks ran, or if all were asked for and those for devices that are not there were skipped;
3 if one was asked for by its name and this machine lacks what it needs; 1 if one failed, after the others ran. What is
missing is a line on standard error.
"""

import argparse
import importlib
import json
import logging
import sys
import traceback
from dataclasses import replace

import torch

from tests.bench import BENCHMARKS, BY_THREADS
from tests.bench.harness import CannotRun, Result
from tests.bench.setup import QUICK, Setup

MISSING = 3
"""The exit status if something that was asked for by name cannot run on this machine."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"one of {', '.join(BENCHMARKS)}, or triton; default: all"
    )
    parser.add_argument("--json", action="store_true", help="print one object per line and nothing else")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], metavar="N",
        help=f"torch's threads (default 1 2: {', '.join(BY_THREADS)} run with one, then with two; the others with two)",
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, help="timed iterations")
    parser.add_argument(
        "--device",
        default="cuda",
        help="of triton/...: cuda (default), or cpu for Triton's interpreter, to try --quick",
    )
    options = parser.parse_args(arguments)
    names = [benchmark for name in options.names for benchmark in _called(name)]
    unknown = [name for name in options.names if not _called(name)]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    size = replace(QUICK if options.quick else Setup(), device=options.device)
    if options.iterations is not None:
        size = replace(size, iterations=options.iterations)

    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    missing, failed = list[str](), list[str]()
    try:
        for name in names or BENCHMARKS:
            for number in options.threads if name in BY_THREADS else options.threads[-1:]:
                torch.set_num_threads(number)
                torch.manual_seed(0)
                try:
                    _run(name, replace(size, threads=number), options.json)
                except CannotRun as error:
                    missing.append(str(error))
                except Exception:  # the others run all the same
                    failed.append(name)
                    traceback.print_exc()
    finally:
        torch.set_num_threads(threads)
    for why in dict.fromkeys(missing):
        print(f"not run: {why}", file=sys.stderr, flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr, flush=True)
        return 1
    return MISSING if missing and names else 0


def _called(name: str) -> list[str]:
    """The benchmarks of a name: itself, or those of a folder."""
    return [benchmark for benchmark in BENCHMARKS if benchmark == name or benchmark.startswith(f"{name}/")]


def _run(name: str, setup: Setup, as_json: bool) -> None:
    heading: tuple[object, ...] = ()
    module, _, function = BENCHMARKS[name].partition(":")
    for result in getattr(importlib.import_module(module), function)(setup):
        if as_json:
            print(json.dumps(result.to_json()), flush=True)
        else:
            heading = _print(result, heading)


def _print(result: Result, heading: tuple[object, ...]) -> tuple[object, ...]:
    """One line, below a heading with the setup wherever that changes."""
    setup = result.setup
    threads = f"{setup['threads']} thread{'s' if setup['threads'] != 1 else ''}"
    own_heading = (result.name, *(setup[key] for key in ("tables", "rows", "dim", "batch", "ids")))
    if own_heading != heading:
        fixed = {"tables", "rows", "dim", "batch", "bag_length", "ids", "threads", "iterations", "seconds", "growth"}
        fixed |= {"ours_gb_s", "peer_gb_s", "ours_share_of_copy", "peer_share_of_copy"}
        how = "medians" if "seconds" in setup else "medians, fresh ids every iteration"
        others = "".join(f", {key} {value}" for key, value in setup.items() if key not in fixed)
        print(
            f"\n{result.name}: {setup['tables']:,} tables, {setup['rows']:,} rows, dim {setup['dim']}, batch "
            f"{setup['batch']:,}, {setup['bag_length']} ids per bag, {setup['ids']} ids, "
            f"{threads}{others}; {how}"
        )
    print(result, flush=True)
    if "ours_gb_s" in setup:
        both = (f"{setup[f'{who}_gb_s']:,.1f} GB/s, {setup[f'{who}_share_of_copy']:.0%}" for who in ("ours", "peer"))
        print(f"  {' against '.join(both)} of the copy bandwidth", flush=True)
    if "seconds" in setup:
        growth = f", {setup['growth']} times the model of half the size" if "growth" in setup else ""
        print(f"  converted in {setup['seconds']} s{growth}", flush=True)
    return own_heading


if __name__ == "__main__":
    sys.exit(main())
