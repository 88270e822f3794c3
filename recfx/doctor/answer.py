"""Whether one kernel, or one training run, was right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What one kernel, or one training run, did.

    Args:
        name: of the operator, or of the run.
        where: ``device`` or ``host``.
        checked: how many shapes, or steps, it was run with.
        wrong: how many of them it was wrong with.
        smallest: the first of those, which is the smallest; ``""`` if there are none.
        message: what was wrong with that one; or, if nothing was, what ``torch.library.opcheck`` said against it.
        traceback: of what was raised, if anything was.
        seconds: all of it, compilation of kernels included.
    """

    name: str
    where: str
    checked: int
    wrong: int = 0
    smallest: str = ""
    message: str = ""
    traceback: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.message
