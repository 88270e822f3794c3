"""What the doctor found: data, text for a terminal or a log, and JSON for a bug report. It imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from recfx.errors import printable
from recfx.errors.grid import Grid
from recfx.versions import __version__

DOCTOR_VERSION = "4"
"""The version of the JSON, which changes if a field does."""


@dataclass(frozen=True)
class Finding:
    """One line of the installation: a thing, what is there, and, unless all is well, the command that mends it."""

    name: str
    found: str
    what_to_do: str = ""


@dataclass(frozen=True)
class Answer:
    """Whether a kernel was as its reference."""

    name: str
    where: str  # ``device`` or ``host``
    checked: int  # how many cases
    wrong: int = 0
    smallest: str = ""  # the first case that was wrong
    message: str = ""  # what was wrong with it, or what ``torch.library.opcheck`` said; ``""`` if all is well
    traceback: str = ""


@dataclass(frozen=True)
class Speed:
    """The median time of a kernel, and its share of the ``bytes`` that a copy moves in the same time."""

    name: str
    milliseconds: float
    bytes: int
    share_of_copy: float

    @property
    def gb_s(self) -> float:
        return self.bytes / self.milliseconds / 1e6


@dataclass(frozen=True)
class Choice:
    """A setting of a kernel: milliseconds by number, the default first; the one in use; the file that says so."""

    name: str
    milliseconds: dict[int, float]
    chosen: int
    kept_in: str = ""


@dataclass
class Report:
    """Everything, in the order in which it is found."""

    device: str  # as it was asked for, such as ``npu:0``
    device_name: str = ""  # as its driver calls it
    how: str = "real"  # or ``interpreted``, by Triton, which has no times
    quick: bool = False
    findings: list[Finding] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    workload: str = ""  # on what speeds were measured; ``""`` if none were
    speeds: list[Speed] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    complete: bool = False  # whether everything was done
    stopped: str = ""  # why it was not

    @property
    def ok(self) -> bool:
        """Whether nothing is missing and nothing is wrong, as far as it went."""
        return not any(one.what_to_do for one in self.findings) and not any(one.message for one in self.answers)

    def to_json(self) -> str:
        """The whole report, indented; the user's home directory is ``~`` in every text."""
        content = {"version": DOCTOR_VERSION, "recfx": __version__, "ok": self.ok, **asdict(self)}
        return _without_home(json.dumps(content, indent=2))

    def __str__(self) -> str:
        from recfx.errors.shown import plain_text, rich_table  # not above: the command line reads this file first

        place = f"recfx on {self.device}{f' ({self.device_name})' if self.device_name else ''}"
        end = "OK" if self.ok else "NOT OK"
        how = "" if self.how == "real" else "Kernels ran in Triton's interpreter. No times."
        lines = [f"{place}: {end}{'' if self.complete else ', NOT COMPLETE'}", how, self.stopped]
        tables: dict[str, tuple[Sequence[object], str]] = {
            "Installation": (self.findings, "name found what_to_do"),
            "Right: kernels against their references": (self.answers, "name where checked wrong smallest message"),
            f"Fast (medians): {self.workload}": (self.speeds, "name milliseconds gb_s share_of_copy"),
            "Choices": (self.choices, "name milliseconds chosen kept_in"),
        }
        for title, (rows, names) in tables.items():
            columns = {name.replace("_", " "): partial(_cell, name) for name in names.split()}
            lines += [f"\n{title}", plain_text([rich_table(Grid.of(title, rows, columns))])] if rows else []
        return _without_home("\n".join(printable(line, keep="\n") for line in lines if line))


def _cell(name: str, row: object) -> str:
    value = getattr(row, name)
    if isinstance(value, dict):
        return ", ".join(f"{number}: {amount:.3f}" for number, amount in value.items())
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _without_home(text: str) -> str:
    home = os.path.expanduser("~")  # where there is none, it stays so
    return text.replace(home, "~") if len(home) > 1 else text
