"""The committed table of operators that involve the host or the AI CPU, in ``host_round_trips.md``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

LISTED = Path(__file__).with_name("host_round_trips.md")
HEADER = (
    "| operator | how it leaves the AI Cores | where | target | collections | when | why |\n"
    "| --- | --- | --- | --- | --- | --- | --- |\n"
)

FALLBACK = "runs on the host"
INSIDE = "its kernel copies to the host"
COPY = "copies to the host"
WAITS = "waits for the size of its result"
AI_CPU = "runs on the AI CPU: "  # and its dtypes, as for the next one
UNKNOWN = "engine unknown: "


class Meeting(NamedTuple):
    """An operator that is called with tensors on an NPU and involves the host or the AI CPU.

    Args:
        operator: its name, with namespace and overload.
        how: one of the constants above, the last two with dtypes.
        where: the innermost file of recfx that was running; ``autograd`` if none was.
    """

    operator: str
    how: str
    where: str


class Moment(NamedTuple):
    """While what was running.

    Args:
        target: of ``recfx.lowering``.
        collections: ``unsharded``, ``sharded``, or ``sharded, ids on the host``.
        when: ``training`` or ``eval``.
    """

    target: str
    collections: str
    when: str


class Occasion(NamedTuple):
    """All moments at which it happens, in the words of the table: see ``Moment``.

    Where it does not happen with every target for all collections in one of the modes, the mode says for which not.
    """

    target: str
    collections: str
    when: str

    @classmethod
    def of(cls, seen: Collection[Moment]) -> Occasion:
        """What is listed of all moments."""
        targets, collections, modes = (sorted(set(values)) for values in zip(*seen, strict=True))
        when = []
        for mode in modes:
            missing = [
                missing_pair
                for missing_pair in product(targets, collections)
                if Moment(*missing_pair, mode) not in seen
            ]
            without = "; ".join(f"{target}: {which}" for target, which in missing)
            when.append(f"{mode} (not {without})" if without else mode)
        return cls("; ".join(targets), "; ".join(collections), "; ".join(when))


class Line(NamedTuple):
    """A line of the table: its occasion and its reason."""

    occasion: Occasion
    why: str


def read() -> dict[Meeting, Line]:
    lines = {}
    for line in LISTED.read_text().partition(HEADER)[2].splitlines():
        operator, how, where, *when, why = (cell.strip() for cell in line.strip("|").split("|"))
        lines[Meeting(operator.strip("`"), how, where.strip("`"))] = Line(Occasion(*when), why)
    return lines


def fallbacks() -> list[str]:
    """The operators that the table says run on the host."""
    return sorted({meeting.operator for meeting in read() if meeting.how == FALLBACK})


def write(meetings: Mapping[Meeting, Occasion]) -> None:
    """Replace the table; reasons stay."""
    known, before = read(), LISTED.read_text().partition(HEADER)[0]
    lines = [
        f"| `{meeting.operator}` | {meeting.how} | `{meeting.where}` | {occasion.target} | "
        f"{occasion.collections} | {occasion.when} | {known[meeting].why if meeting in known else ''} |\n"
        for meeting, occasion in sorted(meetings.items())
    ]
    LISTED.write_text(before + HEADER + "".join(lines))
