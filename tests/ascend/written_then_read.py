"""Reading, within one launch, what that launch has written: right everywhere but on a device.

Programs of a launch are not ordered, and on Ascend a core reads scalars through a cache that its own copies to memory
pass by. No compiler and no run on the CPU shows it, so the interpreter's loads and stores are watched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def refused() -> Iterator[None]:
    """Within it, in the interpreter: one launch. A load of an element that was stored before is an AssertionError."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    written: set[int] = set()

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        again = written.intersection(pointers.data[mask.data].tolist())
        assert not again, f"{len(again)} elements are read after the launch has written them"
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        written.update(pointers.data[mask.data].tolist())
        return store(self, pointers, value, mask, *rest)

    with (
        patch.object(InterpreterBuilder, "create_masked_load", watched_load),
        patch.object(InterpreterBuilder, "create_masked_store", watched_store),
    ):
        yield
