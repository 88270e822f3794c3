"""``make matrix SETS="2.7 2.14"``: recfx's tests on other versions of torch, TorchRec and FBGEMM."""

import argparse
import sys
from typing import Any

from tests.tools.matrix import names
from tests.tools.matrix.causes import SETS, cause, failed
from tests.tools.matrix.environment import Environment

_IGNORED = ("--ignore=tests/ascend", "--ignore=tests/tools")
_SUITE = ("-q", "-p", "no:cacheprovider", "--dist=loadfile", "--no-loadscope-reorder", *_IGNORED)


def main() -> int:
    """Run on each set what is asked for; 1 if something fails on one of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.matrix", description=__doc__)
    parser.add_argument("sets", nargs="+", choices=[versions.name for versions in SETS])
    parser.add_argument("--names", action="store_true", help="only look for the names that recfx uses, and keep them")
    parser.add_argument("--smoke", action="store_true", help="only the shortest way through recfx")
    parser.add_argument("--jobs", default="auto", help="processes that run tests")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files or folders of tests (default: all)")
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
                failures += not _suite(versions, environment, given.tests, given.jobs)
    if given.names and not failures:
        names.KNOWN.write_text("\n".join(names.used_names()) + "\n")
    return int(failures > 0)


def _suite(versions: Any, environment: Environment, tests: list[str], jobs: str) -> bool:
    """Whether whatever fails has a known cause."""
    xml = environment.folder / "results.xml"
    processes = ["-n", jobs, "--maxprocesses=4", f"--junitxml={xml}"]
    environment.run(["-m", "recfx.kernels"])
    environment.run(["-m", "pytest", *_SUITE, *processes, *tests])
    causes = {test: cause(versions.name, test) for test in failed(xml)}
    for test, why in causes.items():
        print(f"{test}: {why or 'FAILS WITHOUT A KNOWN CAUSE'}")
    return all(causes.values())


if __name__ == "__main__":
    sys.exit(main())
