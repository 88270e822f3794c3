"""What the doctor found: data, text for a terminal or a log, and JSON to attach to a bug report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recfx.doctor.finding import Finding, Status
from recfx.errors import printable
from recfx.printing.grid import Grid
from recfx.printing.text import plain_text, rich_table
from recfx.versions import __version__

DOCTOR_VERSION = "2"
"""The version of the JSON, which changes if a field does."""

HOW = {
    "real": "",
    "simulated": "SIMULATED: CANN is a stand-in here and nothing was computed by an NPU. No times.",
    "interpreted": "Kernels ran in Triton's interpreter. No times.",
}


@dataclass(frozen=True)
class Speed:
    """The median time of one thing.

    Args:
        name: of the operator, or what else was done.
        milliseconds: the median; of the device, where it has a clock.
        bytes: that have to be read and written for it, each row as often as it is asked for.
        share_of_copy: of the bytes that a copy on the same device moved in the same time.
    """

    name: str
    milliseconds: float
    bytes: int
    share_of_copy: float

    @property
    def gb_s(self) -> float:
        """Gigabytes per second."""
        return self.bytes / self.milliseconds / 1e6


@dataclass(frozen=True)
class Choice:
    """What was tried with several numbers.

    Args:
        name: what the number is of.
        milliseconds: by number, the default first.
        chosen: the number that is in use from now on.
        kept_in: the file that says so; ``""`` if it is not kept.
    """

    name: str
    milliseconds: dict[int, float]
    chosen: int
    kept_in: str = ""


@dataclass
class Report:
    """Everything, in the order in which it is found.

    Args:
        device: as it was asked for, such as ``npu:0``.
        device_name: as its driver calls it; ``""`` if it is not there.
        how: ``real``, ``simulated`` or ``interpreted``; only the first one has times.
        quick: whether less was looked at.
        findings: what is installed.
        answers: whether kernels are right; each a :class:`recfx.doctor.kernel_check.Answer`.
        workload: on what speeds were measured; ``""`` if none were.
        speeds: how fast kernels are.
        choices: which numbers of programs and of rows in flight are best.
        complete: whether everything was done; False after Ctrl-C, and where nothing can be run.
        stopped: why it is not complete.
    """

    device: str
    device_name: str = ""
    how: str = "real"
    quick: bool = False
    findings: list[Finding] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    workload: str = ""
    speeds: list[Speed] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    complete: bool = False
    stopped: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is missing and nothing is wrong, as far as it went."""
        missing = any(finding.status == Status.MISSING for finding in self.findings)
        return not missing and not any(answer.message for answer in self.answers)

    def to_json(self) -> str:
        """The whole report, indented; the user's home directory is ``~`` in every text."""
        content = {"version": DOCTOR_VERSION, "recfx": __version__, "ok": self.ok, **asdict(self)}
        return without_home(json.dumps(content, indent=2, default=str))

    def __str__(self) -> str:
        place = f"recfx on {self.device}{f' ({self.device_name})' if self.device_name else ''}"
        end = "OK" if self.ok else "NOT OK"
        lines = [f"{place}: {end}{'' if self.complete else ', NOT COMPLETE'}", HOW[self.how], self.stopped]
        for grid in (_grid(self.workload, rows) for rows in (self.findings, self.answers, self.speeds, self.choices)):
            if grid is not None:
                lines += ["\n" + grid.title, plain_text([rich_table(grid)])]
        return without_home("\n".join(printable(line, keep="\n") for line in lines if line))


_Columns = Mapping[str, Callable[[Any], str]]
_FINDINGS: _Columns = {
    "": lambda finding: finding.name,
    "status": lambda finding: str(finding.status),
    "here": lambda finding: finding.found,
    "what to do": lambda finding: finding.what_to_do,
}
_ANSWERS: _Columns = {
    "": lambda answer: answer.name,
    "on": lambda answer: answer.where,
    "shapes": lambda answer: f"{answer.checked}",
    "wrong": lambda answer: f"{answer.wrong}" if answer.message else "",
    "smallest that is wrong": lambda answer: answer.smallest,
    "what is wrong": lambda answer: answer.message,
}
_SPEEDS: _Columns = {
    "": lambda speed: speed.name,
    "ms": lambda speed: f"{speed.milliseconds:.3f}",
    "GB/s": lambda speed: f"{speed.gb_s:,.1f}",
    "of a copy": lambda speed: f"{speed.share_of_copy:.0%}",
}
_CHOICES: _Columns = {
    "": lambda choice: choice.name,
    "ms by number": lambda choice: ", ".join(f"{number}: {ms:.3f}" for number, ms in choice.milliseconds.items()),
    "in use": lambda choice: f"{choice.chosen}",
    "kept in": lambda choice: choice.kept_in,
}


def _grid(workload: str, rows: Sequence[Any]) -> Grid | None:
    """The table of findings, answers, speeds or choices; None if there are none."""
    if not rows:
        return None
    if isinstance(rows[0], Speed):
        return Grid.of(f"Fast (medians): {workload}", rows, _SPEEDS, tuple(_SPEEDS)[1:])
    if isinstance(rows[0], Choice):
        return Grid.of("Choices", rows, _CHOICES)
    if isinstance(rows[0], Finding):
        return Grid.of("Installation", rows, _FINDINGS)
    return Grid.of("Right: kernels against their references", rows, _ANSWERS)


def without_home(text: str) -> str:
    """The text with ``~`` for the user's home directory, whose name is often the user's."""
    home = os.path.expanduser("~")  # where there is none, it stays so
    return text.replace(home, "~") if len(home) > 1 else text
