"""One thing that the user should know: a refusal, a warning or a note, with its code, its place and what to do.

The same value is raised (``recfx.errors``), recorded when a model is converted, returned by a pass or a kernel target
that declines, and shown in a report.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """How much a diagnostic matters, the worst first. Equal to its string value, which JSON and text show."""

    ERROR = "error"  # something was refused, or is wrong: a report that has one is not ok
    WARNING = "warning"  # it works, but probably not as the user wants it
    INFO = "info"  # worth knowing

    def __str__(self) -> str:
        return str(self.value)

    @property
    def rank(self) -> int:
        """0 for the worst: the order in which diagnostics are shown."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Diagnostic:
    """One thing that the user should know. ``str()`` is one line.

    Args:
        code: the reason code, ``snake_case``: for programs, and to search for.
        path: fully qualified name of the module, collection or table that it is about; ``""`` for the whole model.
        message: what happened or what is the case, in one sentence.
        what_to_do: what the user can change; ``""`` if nothing needs to change.
        severity: how much it matters.
        by: the pass or the kernel target that declined; ``""`` if none did.
        node: name of the graph node that it is about, if any.
    """

    code: str
    path: str
    message: str
    what_to_do: str = ""
    severity: Severity = Severity.INFO
    by: str = ""
    node: str = ""

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        advice = f" What to do: {self.what_to_do}" if self.what_to_do else ""
        return f"[{self.code}] {place}{self.message}{advice}"
