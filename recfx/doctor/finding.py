"""One thing that the doctor looked at, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(str, Enum):
    """How a thing is. Equal to its string value, which all reports show."""

    OK = "ok"
    WARNING = "warning"  # it works, but perhaps not as one would want it
    MISSING = "missing"  # it is needed, and absent, broken or of a version that does not fit

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Finding:
    """One line of the installation.

    Args:
        name: of the thing.
        status: how it is.
        found: what is there, in a few words.
        what_to_do: one sentence, with one command if one is enough; ``""`` if nothing is to be done.
    """

    name: str
    status: Status
    found: str
    what_to_do: str = ""


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name, Status.OK, found)


def warning(name: str, found: str, what_to_do: str) -> Finding:
    """It works, more or less."""
    return Finding(name, Status.WARNING, found, what_to_do)


def missing(name: str, found: str, what_to_do: str) -> Finding:
    """It does not."""
    return Finding(name, Status.MISSING, found, what_to_do)
