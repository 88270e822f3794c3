"""``python -m tests.tools.mutants [package or file ...]``: how many of a sample of faults the tests notice.

Exit status 0 when at least nine in ten of those that are not equivalent (``equivalent.txt``) are noticed.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.tools.mutants.choose_tests import tests_for
from tests.tools.mutants.mutate import Mutant, mutants_of
from tests.tools.mutants.run import Outcome, copy_of, run_tests

PACKAGES = [
    "passes", "runtime", "hashing", "collections/sharding", "checkpoint", "verification", "lowering", "optim",
    "pipeline", "discovery", "exporter", "planner", "kernels",
]  # fmt: skip
"""Those that decide results."""
ENOUGH = 0.9
EQUIVALENT = Path(__file__).with_name("equivalent.txt")


def files_of(name: str) -> list[Path]:
    """The files of a package or folder, or the one file."""
    if Path(name).is_file() and Path(name).suffix == ".py":
        return [Path(name)]
    for folder in (Path(name), Path("recfx", name)):
        if folder.is_dir():
            return sorted(folder.rglob("*.py"))
    raise SystemExit(f"there is no package '{name}', and no file of Python")


def sample(files: Sequence[Path], size: int, seed: int) -> list[Mutant]:
    """Mutants of random lines: each file is drawn as often as it has lines with mutants, each line once at most."""
    draw = random.Random(seed)
    lines = [(file, line) for file in sorted(set(files)) for line in range(1, file.read_text().count("\n") + 1)]
    draw.shuffle(lines)
    of_file: dict[Path, dict[int, list[Mutant]]] = {}  # made when a line is drawn: to parse all files takes minutes
    chosen: list[Mutant] = []
    for file, line in lines:
        if len(chosen) == size:
            break
        if file not in of_file:
            of_file[file] = {}
            for mutant in mutants_of(file):
                of_file[file].setdefault(mutant.line, []).append(mutant)
        if line in of_file[file]:
            chosen.append(draw.choice(of_file[file][line]))
    return chosen


def _one_line(text: str) -> str:
    return " ".join(text.split())


def equivalents() -> set[tuple[str, str]]:
    """File and changed lines (white space apart) of those that change nothing that anybody could see."""
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    return {(file.strip(), _one_line(change)) for file, change, _ in (line.split(" | ", 2) for line in lines)}


def judge(copy: Path, mutant: Mutant, tests: Sequence[str], seconds: float) -> Outcome:
    """What the tests say to one mutant, which is in the copy meanwhile."""
    (copy / mutant.path).write_text(mutant.source)
    try:
        return run_tests(copy, tests, seconds)
    finally:
        (copy / mutant.path).write_text(mutant.original)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutants", description=__doc__)
    parser.add_argument("what", nargs="*", default=PACKAGES, help=f"packages or files (default: {' '.join(PACKAGES)})")
    parser.add_argument("--sample", type=int, default=24, help="how many mutants (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="which ones; each seed draws others (default: 0)")
    parser.add_argument("--minutes", type=float, default=10, help="time limit of the whole run (default: 10)")
    parser.add_argument("--each", type=float, default=120, help="seconds for one mutant (default: 120)")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the copy is removed then, too

    known = equivalents()
    drawn = sample([file for name in arguments.what for file in files_of(name)], arguments.sample, arguments.seed)
    mutants = [mutant for mutant in drawn if (str(mutant.path), mutant.change) not in known]
    tests = {mutant.path: tests_for(mutant.path) for mutant in mutants}  # as they are now, like the copy
    print(f"{len(drawn)} mutants, {len(drawn) - len(mutants)} of them equivalent", flush=True)
    killed: Counter[Path] = Counter()
    survived: Counter[Path] = Counter()
    killers: dict[str, list[Mutant]] = {}
    late = 0
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve() / "copy"
        copy_of(Path.cwd(), copy)
        for number, mutant in enumerate(mutants, 1):
            if time.monotonic() > until:
                print(f"time limit: {len(mutants) - number + 1} mutants were not tried")
                break
            outcome = judge(copy, mutant, tests[mutant.path], min(arguments.each, until - time.monotonic()))
            where = f"{mutant.path}:{mutant.line}"
            if outcome.killed_by is not None:
                killed[mutant.path] += 1
                killers.setdefault(outcome.killed_by, []).append(mutant)
                print(f"{number:3} killed   {where}  ({outcome.seconds:.0f} s) {outcome.killed_by}", flush=True)
            else:
                why = "" if outcome.ended else ", its time was over"
                late += not outcome.ended
                survived[mutant.path] += 1
                print(
                    f"{number:3} SURVIVED {where}  ({outcome.seconds:.0f} s{why})",
                    mutant.difference,
                    sep="\n",
                    flush=True,
                )
        false = _failing_anyway(copy, sorted(killers.keys() - {"the process ended"}))
    for path in sorted({*killed, *survived}):
        print(f"{path}: {killed[path]} killed, {survived[path]} survived")
    for test in false:
        print(f"FAILS WITHOUT A MUTANT, TOO: {test}")
    total = killed.total() + survived.total()
    print(
        f"{killed.total()} of {total} killed; the time of {late} of those that survived was over before all tests ran"
    )
    return int(bool(false) or killed.total() < ENOUGH * total)


def _failing_anyway(copy: Path, tests: list[str]) -> list[str]:
    """Those of the tests that killed a mutant which fail in the unchanged copy: they have killed nothing."""
    if not tests or run_tests(copy, tests, 600).killed_by is None:
        return []
    return [test for test in tests if run_tests(copy, [test], 600).killed_by is not None]


if __name__ == "__main__":
    sys.exit(main())
