"""Standard output carries the result alone, whatever the model's code prints, and may be closed at any time."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """What is printed inside goes to stderr: by Python code, by C++ code, and by processes that are started."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        descriptor, errors = sys.stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation):  # replaced by something that is no file
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    saved = os.dup(descriptor)
    os.dup2(errors, descriptor)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, descriptor)
        os.close(saved)


def give_up_output() -> None:
    """Nothing reads stdout any more: let Python's last flush go nowhere, instead of complaining."""
    with contextlib.suppress(OSError, io.UnsupportedOperation), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
