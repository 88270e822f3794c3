"""``python -m tests.mutants [package or file ...]``: how many of a sample of faults the tests notice.

Exit status 0 when at least nine in ten of those that are not equivalent (``equivalent.txt``) are noticed.
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.choose_tests import tests_for
from tests.mutants.mutate import Mutant, mutants_of
from tests.mutants.run import copy_of, preload, run_tests

PACKAGES = ["passes", "nodes", "hashing", "sharding", "checkpoint", "verification", "lowering", "optim"]
"""Those that decide results."""
ENOUGH = 0.9
EQUIVALENT = Path(__file__).with_name("equivalent.txt")


def files_of(name: str) -> list[Path]:
    """The files of a package or folder, or the one file."""
    if name.endswith(".py"):
        return [Path(name)]
    for folder in (Path(name), Path("recfx", name)):
        if folder.is_dir():
            return sorted(folder.rglob("*.py"))
    raise SystemExit(f"there is no file or package '{name}'")


def sample(files: Sequence[Path], size: int, seed: int) -> list[Mutant]:
    """Mutants of random lines: each file is drawn as often as it has lines with mutants, each line once at most."""
    lines: dict[tuple[Path, int], list[Mutant]] = {}
    for file in files:
        for mutant in mutants_of(file):
            lines.setdefault((file, mutant.line), []).append(mutant)
    draw = random.Random(seed)
    chosen = draw.sample(sorted(lines), min(size, len(lines)))
    return [draw.choice(lines[place]) for place in chosen]


def difference(mutant: Mutant) -> str:
    """The changed lines, as a diff without context."""
    before, after = (text.splitlines() for text in (mutant.module.code, mutant.source))
    lines = difflib.unified_diff(before, after, str(mutant.path), "mutant", lineterm="", n=0)
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def equivalents() -> set[tuple[str, str]]:
    """File and changed lines (white space apart) of those that change nothing that anybody could see."""
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    return {(file.strip(), _one_line(change)) for file, change, _ in (line.split(" | ", 2) for line in lines)}


def change_of(mutant: Mutant) -> str:
    """Its changed lines as ``equivalent.txt`` has them."""
    return _one_line(" ".join(difference(mutant).splitlines()[3:]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("what", nargs="*", default=PACKAGES, help=f"packages or files (default: {' '.join(PACKAGES)})")
    parser.add_argument("--sample", type=int, default=24, help="how many mutants (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="which ones; each seed draws others (default: 0)")
    parser.add_argument("--minutes", type=float, default=8, help="time limit of the whole run (default: 8)")
    parser.add_argument("--each", type=float, default=120, help="time limit of one mutant, in seconds (default: 120)")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    known = equivalents()
    drawn = sample([file for name in arguments.what for file in files_of(name)], arguments.sample, arguments.seed)
    mutants = [each for each in drawn if (str(each.path), change_of(each)) not in known]
    tests = {mutant.path: tests_for(mutant.path) for mutant in mutants}  # as they are now, like the copy
    print(f"{len(drawn)} mutants, {len(drawn) - len(mutants)} of them equivalent", flush=True)
    killed: Counter[Path] = Counter()
    survived: dict[Path, list[str]] = {}
    killers: dict[str, list[Mutant]] = {}
    deadline = time.monotonic() + 60 * arguments.minutes
    preload()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        copy_of(Path.cwd(), copy)
        for number, mutant in enumerate(mutants, 1):
            left = deadline - time.monotonic()
            if left <= 0:
                print(f"time limit: {len(mutants) - number + 1} mutants were not tried")
                break
            original = (copy / mutant.path).read_text()
            (copy / mutant.path).write_text(mutant.source)
            outcome = run_tests(copy, tests[mutant.path], min(arguments.each, left))
            (copy / mutant.path).write_text(original)
            where = f"{mutant.path}:{mutant.line}"
            if outcome.killed_by is not None:
                killed[mutant.path] += 1
                killers.setdefault(outcome.killed_by, []).append(mutant)
                print(f"{number:3} killed   {where}  ({outcome.seconds:.0f} s) {outcome.killed_by}", flush=True)
            else:
                why = "" if outcome.ended else ", its time was over"
                survived.setdefault(mutant.path, []).append(difference(mutant))
                print(f"{number:3} SURVIVED {where}  ({outcome.seconds:.0f} s{why})", flush=True)
        false = _failing_anyway(copy, sorted(killers.keys() - {"hangs", "the process ended", "conftest.py"}))
    for path in sorted({*killed, *survived}):
        print(f"{path}: {killed[path]} killed, {len(survived.get(path, []))} survived")
    for diffs in survived.values():
        print("", *diffs, sep="\n")
    for test in false:
        print(f"FAILS WITHOUT A MUTANT, TOO: {test}")
    total = killed.total() + sum(map(len, survived.values()))
    print(f"{killed.total()} of {total} killed")
    return int(bool(false) or killed.total() < ENOUGH * total)


def _failing_anyway(copy: Path, tests: list[str]) -> list[str]:
    """Those of the tests that killed a mutant which fail in the unchanged copy: they have killed nothing."""
    if not tests or run_tests(copy, tests, 600).killed_by is None:
        return []
    return [test for test in tests if run_tests(copy, [test], 120).killed_by is not None]


if __name__ == "__main__":
    sys.exit(main())
