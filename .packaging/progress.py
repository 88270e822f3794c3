"""Run a command and show in one line how long it has run and what it last said; if it fails, all that it said.

python progress.py command arguments ...
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time


def main(command: list[str]) -> int:
    """The command's exit status."""
    begin, said = time.monotonic(), b""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=1):
                more = os.read(process.stdout.fileno(), 1 << 16)
                if not more:
                    break
                said += more
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            show(f"{time.monotonic() - begin:4.0f} s  {last[:90]}")
    failed = process.wait()
    show("")
    if failed:
        print(said.decode(errors="replace"), end="")
    else:
        print(f"done in {time.monotonic() - begin:.0f} s")
    return failed


def show(text: str) -> None:
    """Replace the line, where there is a terminal."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
