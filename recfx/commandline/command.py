"""What a command of ``python -m recfx`` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

# Exit statuses. Besides these, 130 after Ctrl-C and 141 if nothing reads the output any more, as usual in a shell.
DONE, NOT_OK, NO_MODEL = 0, 1, 2


class Outcome(NamedTuple):
    """What a command prints, and its exit status. What has colours in a terminal is plain text elsewhere."""

    output: object
    status: int = DONE


class WrongUsage(Exception):
    """The options do not fit each other, or the model. The message is shown."""


class NoModelError(Exception):
    """The command line gives no model. The message is one line; the cause, if any, is what the user's code raised."""


class Argument:
    """One argument of a command: what ``argparse.ArgumentParser.add_argument`` takes."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.name, self.settings = name, settings


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        name: what follows ``python -m recfx``.
        help: one line.
        description: what it prints, and when its exit status is 1.
        example: a command line that works, without ``python -m recfx``.
        arguments: its arguments, beside the factory.
        has_factory: whether the command is about a model.
    """

    name: str
    help: str
    description: str
    example: str
    arguments: tuple[Argument, ...]
    has_factory: bool = True
