"""``make matrix SETS="2.7 2.14"``: recfx's tests on other versions of torch, TorchRec and FBGEMM."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tests.tools.matrix import names
from tests.tools.matrix.environment import ROOT, Environment
from tests.tools.matrix.record import SETS, keep, read, unexplained

_IGNORED = ("--ignore=tests/ascend", "--ignore=tests/tools")
_SUITE = ("-q", "-p", "no:cacheprovider", "--dist=loadfile", "--no-loadscope-reorder", *_IGNORED)


def main() -> int:
    """Run on each set what is asked for; 1 if something fails on one of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.matrix", description=__doc__)
    parser.add_argument("sets", nargs="+", choices=[versions.name for versions in SETS])
    parser.add_argument("--names", action="store_true", help="only look for the names that recfx uses, and keep them")
    parser.add_argument("--smoke", action="store_true", help="only the shortest way through recfx")
    parser.add_argument("--jobs", default="auto", help="processes that run tests")
    parser.add_argument("--tests", nargs="*", help="files or folders of tests to run again, if all have run")
    parser.add_argument("--failed", action="store_true", help="run those files again in which something failed")
    given = parser.parse_args()
    failures = 0
    for versions in SETS:
        if versions.name in given.sets:
            print(f"\n==> torch {versions.torch}, TorchRec {versions.torchrec}, FBGEMM {versions.fbgemm}", flush=True)
            environment = Environment(versions)
            environment.make()
            failures += environment.run(["-m", "tests.tools.matrix.names"]).returncode != 0
            if given.smoke:
                failures += environment.run(["-m", "tests.tools.matrix.smoke"]).returncode != 0
            elif not given.names:
                failures += not _suite(versions, environment, given)
    if given.names and not failures:
        names.KNOWN.write_text("\n".join(names.used_names()) + "\n")
    return int(failures > 0)


def _suite(versions: Any, environment: Environment, given: argparse.Namespace) -> bool:
    xml, results = environment.folder / "results.xml", environment.folder / "results.json"
    before = json.loads(results.read_text()) if results.is_file() and (given.tests or given.failed) else {}
    tests = unexplained(versions.name, before) if given.failed else given.tests or ["tests"]
    if tests:
        processes = ["-n", given.jobs, "--maxprocesses=4", f"--junitxml={xml}"]
        environment.run(["-m", "recfx.kernels"])
        environment.run(["-m", "pytest", *_SUITE, *processes, *tests])
    files = {**before, **(read(xml) if tests else {})}
    results.write_text(json.dumps(files))
    version = environment.run(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True)
    path = keep(versions, version.stdout.strip(), files)
    print(f"written: {path.relative_to(ROOT)}; python -m tests.tools.matrix.record prints the table of tests/README.md")
    for file in unexplained(versions.name, files):
        print(f"fails without a known cause: {file}")
    return not unexplained(versions.name, files)


if __name__ == "__main__":
    sys.exit(main())
