"""One fault: a file, a line, and the text with the fault in it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One fault: the file, the line where it begins, the text before, and what makes the whole text with the fault."""

    path: Path
    line: int
    original: str = field(repr=False)
    make: Callable[[], str] = field(repr=False)

    @property
    def source(self) -> str:
        """The whole text of the file with the fault."""
        return self.make()

    @property
    def difference(self) -> str:
        """The changed lines, as a diff without context."""
        before, after = self.original.splitlines(), self.source.splitlines()
        return "\n".join(difflib.unified_diff(before, after, str(self.path), "mutant", lineterm="", n=0))

    @property
    def change(self) -> str:
        """The changed lines as ``equivalent.txt`` has them: those of the difference, white space apart."""
        return " ".join(" ".join(self.difference.splitlines()[3:]).split())
