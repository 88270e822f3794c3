"""Which backwards of a sharded collection have run: with each call, ranks tell each other of those since the last one.

A rank whose loss leaves a collection out takes no part in its backward. Collectives are matched only by their order, so
the other ranks wait for it, or exchange their gradients for its gradients of another call.
"""

from __future__ import annotations

from typing import ClassVar


class Backwards:
    """The backwards of one collection.

    Args:
        collection: its fully qualified name.

    Attributes:
        errors: how often ranks have learned that they were not in step, after which all of them begin anew.
    """

    errors: ClassVar[int] = 0

    def __init__(self, collection: str) -> None:
        self.collection = collection
        self._calls, self._run, self._seen_errors = 0, 0, self.errors

    def begin_call(self) -> tuple[int, int]:
        """The number of the call that begins, and what its mark says of the backwards since the call before it."""
        if self._seen_errors != self.errors:
            self._calls, self._run, self._seen_errors = 0, 0, self.errors
        self._calls, run, self._run = self._calls + 1, self._run, 0
        return self._calls, run << 1 | bool(run)

    def run(self, call: int) -> None:
        """Note that ranks exchange the gradients of a call."""
        self._run += 1 + (call * 2_654_435_761 >> 12 & 0xFFFFF)  # a sum tells which calls it is of
