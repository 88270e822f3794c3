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
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor, errors = sys.stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation):  # closed by the shell, or replaced by something that is no file
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


def encode_everything() -> None:
    """A name that the encoding of the terminal or the pipe does not have is printed as a backslash escape."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does anyway


def give_up_output() -> None:
    """Nothing reads stdout any more: let Python's last flush go nowhere, instead of complaining."""
    with contextlib.suppress(OSError, AttributeError, io.UnsupportedOperation), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
