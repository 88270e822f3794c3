"""What a command is, and how it ends."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from recfx.commandline.factory import Made
from recfx.conversion.convert import convert
from recfx.conversion.request import DEFAULT_HASHING
from recfx.hashing import HashConfig

# Exit statuses. Besides these, 130 after Ctrl-C and 141 if nothing reads the output any more, as usual in a shell.
DONE, NOT_OK, NO_MODEL = 0, 1, 2

STATUSES = """\
exit status:
  0    all is well: the report is ok, the models agree, the file is written
  1    something is refused, the models do not agree, or a file cannot be written
  2    the command line is wrong, or the factory gives no model
  130  interrupted by Ctrl-C
  141  nothing reads the output any more"""


class Outcome(NamedTuple):
    """What a command prints, and its exit status. What has colours in a terminal is plain text elsewhere."""

    output: object
    status: int = DONE


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        name: what follows ``python -m recfx``.
        help: one line.
        description: what it prints, and when its exit status is 1.
        example: a command line that works, without ``python -m recfx``.
        add_arguments: adds its options to the parser.
        run: does it.
    """

    name: str
    help: str
    description: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Made], Outcome]


class WrongUsage(Exception):
    """The options do not fit each other, or the model. The message is shown."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option that all commands have."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_conversion(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that convert the model."""
    parser.add_argument(
        "--raw-ids", action="store_true", help="convert with HashConfig(dense_rows=0): ids may be any 64-bit integers"
    )
    parser.add_argument("--keep", action="store_true", help="leave collections that cannot be converted as they are")


def request(given: argparse.Namespace) -> dict[str, Any]:
    """What the options of ``add_conversion`` ask of ``recfx.convert`` and of ``recfx.explain``."""
    hashing = HashConfig(dense_rows=0) if given.raw_ids else DEFAULT_HASHING
    return {"hashing": hashing, "on_unsupported": "keep" if given.keep else "error"}


def converted(given: argparse.Namespace, made: Made) -> nn.Module:
    """The model, converted as the options say; it stays as it is if it is converted already.

    Args:
        given: the options of ``add_conversion``.
        made: the model.

    Raises:
        ConversionError: the same as ``convert``.
    """
    return convert(made.model, made.sample, verify=False, **request(given))
