"""What the doctor found, as data, and as versioned JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from recfx.doctor.answer import Answer
from recfx.doctor.finding import Finding, Status
from recfx.doctor.speed import Choice, Speed
from recfx.versions import __version__

DOCTOR_VERSION = "1"
"""The version of the JSON, which changes if a field does."""


@dataclass
class Report:
    """Everything, in the order in which it is found.

    Args:
        device: as it was asked for, such as ``npu:0``.
        device_name: as its driver calls it; ``""`` if it is not there.
        how: ``real``, ``simulated`` or ``interpreted``; only the first one has times.
        quick: whether less was looked at.
        findings: what is installed.
        answers: whether kernels, and models, are right.
        workload: on what speeds were measured; ``""`` if none were.
        speeds: how fast kernels are.
        choices: which numbers of programs, of rows in flight, or of threads are best.
        complete: whether everything was done; False after Ctrl-C, and where nothing can be run.
        stopped: why it is not complete.
    """

    device: str
    device_name: str = ""
    how: str = "real"
    quick: bool = False
    findings: list[Finding] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    workload: str = ""
    speeds: list[Speed] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    complete: bool = False
    stopped: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is missing and nothing is wrong, as far as it went."""
        return not self._missing and not self._wrong

    @property
    def _missing(self) -> int:
        return sum(finding.status == Status.MISSING for finding in self.findings)

    @property
    def _wrong(self) -> int:
        return sum(not answer.ok for answer in self.answers)

    @property
    def headline(self) -> str:
        """One line."""
        told = [f"{count} {what}" for count, what in ((self._missing, "missing"), (self._wrong, "wrong")) if count]
        place = f"recfx on {self.device}{f' ({self.device_name})' if self.device_name else ''}"
        mark = {"real": "", "simulated": ", SIMULATED", "interpreted": ", interpreted"}[self.how]
        end = "OK" if self.ok else "NOT OK"
        return f"{place}{mark}: {', '.join([*told, end])}{'' if self.complete else ', NOT COMPLETE'}"

    def to_json(self) -> str:
        """The whole report, indented; the user's home directory is ``~`` in every text."""
        content = {"version": DOCTOR_VERSION, "recfx": __version__, "ok": self.ok, **asdict(self)}
        return json.dumps(_without_home(content), indent=2, default=str)


def _without_home(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_home(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_home(item) for item in value]
    return without_home(value) if isinstance(value, str) else value


def without_home(text: str) -> str:
    """The text with ``~`` for the user's home directory, whose name is often the user's."""
    home = os.path.expanduser("~")  # where there is none, it stays so
    return text.replace(home, "~") if len(home) > 1 else text
