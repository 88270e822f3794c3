"""Reads the command line, makes the model, runs one command and returns its exit status."""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
import traceback
from collections.abc import Sequence

from rich.console import Console

from recfx.commandline import cost, draw, explain, export, graph, verify
from recfx.commandline.command import NO_MODEL, NOT_OK, STATUSES, Command, Outcome, WrongUsage
from recfx.commandline.factory import NoModelError, make
from recfx.commandline.streams import encode_everything, give_up_output, prints_to_stderr
from recfx.errors import RecfxError
from recfx.version import __version__

COMMANDS: tuple[Command, ...] = (
    explain.COMMAND,
    graph.COMMAND,
    draw.COMMAND,
    cost.COMMAND,
    verify.COMMAND,
    export.COMMAND,
)

INTERRUPTED, NO_READER = 130, 141

_WIDTH = 110
_PROGRAM = "python -m recfx"
_FACTORY = """\
The factory takes no arguments and returns a model, or (model, sample), where sample is one call of the model: a
tuple of its positional arguments, or recfx.Sample(dense, labels=labels). It is named as package.module:factory, or
as path/to/file.py:factory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: those of the command, without the program's name. Default: those of the command line.

    Raises:
        SystemExit: 2, for a command line that is wrong or gives no model; 0 for ``--help``.
    """
    try:
        given = _parser().parse_args(arguments)
        (command,) = (each for each in COMMANDS if each.name == given.command)
        outcome = _run(command, given)
        if isinstance(outcome, int):
            return outcome
        return _print(command, outcome)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        give_up_output()
        return NO_READER


def _run(command: Command, given: argparse.Namespace) -> Outcome | int:
    """The outcome, or the status if there is nothing to print but what was written to stderr."""
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # it warns of the names of its own functions
    try:
        with prints_to_stderr():
            return command.run(given, make(given.factory))
    except (NoModelError, WrongUsage) as error:
        if given.traceback and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        hint = "; --traceback shows where" if error.__cause__ is not None and not given.traceback else ""
        print(f"{_PROGRAM} {command.name}: error: {error}{hint}", file=sys.stderr)
        raise SystemExit(NO_MODEL) from None
    except (RecfxError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        if given.traceback:
            traceback.print_exception(error)
        print(f"{_PROGRAM} {command.name}: {error}", file=sys.stderr)
        return NOT_OK


def _print(command: Command, outcome: Outcome) -> int:
    """Colours and the terminal's width in a terminal, plain text elsewhere. Returns the exit status."""
    try:
        encode_everything()
        if sys.stdout is not None and sys.stdout.isatty() and not isinstance(outcome.output, str):
            Console(highlight=False, markup=False, emoji=False).print(outcome.output)
        else:
            print(outcome.output, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        give_up_output()
        print(f"{_PROGRAM} {command.name}: the output cannot be written: {error.strerror}", file=sys.stderr)
        return NOT_OK
    return outcome.status


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=f"A graph-rewriting compiler pass for TorchRec.\n\n{_FACTORY}",
        epilog=f"example:\n  {_PROGRAM} explain model.py:make_model\n\n{STATUSES}",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"recfx {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for each in COMMANDS:
        command = commands.add_parser(
            each.name,
            help=each.help,
            description=f"{textwrap.fill(each.description, _WIDTH)}\n\n{_FACTORY}",
            epilog=f"example:\n  {_PROGRAM} {each.example}\n\n{STATUSES}",
            formatter_class=raw,
        )
        command.add_argument("factory", metavar="module:factory", help="returns a model, or (model, sample)")
        each.add_arguments(command)
        command.add_argument("--traceback", action="store_true", help="also print where an error was raised")
    return parser
