"""Reads the command line, makes the model, runs one command and returns its exit status.

Standard output carries the result alone, whatever the model's code prints, and may be closed at any time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence

from recfx.commandline.command import NO_MODEL, NOT_OK, Command, NoModelError, Outcome, WrongUsage
from recfx.commandline.commands import COMMANDS
from recfx.commandline.given_file import as_typed
from recfx.errors import RecfxError
from recfx.versions import __version__

INTERRUPTED, NO_READER = 130, 141

_STATUSES = """\
exit status:
  0    all is well: the report is ok, the models agree, the file is written
  1    something is refused, missing or wrong, the models do not agree, or a file cannot be written
  2    the command line is wrong, or the factory gives no model
  130  interrupted by Ctrl-C
  141  nothing reads the output any more"""
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
        (command,) = (command for command in COMMANDS if command.name == given.command)
        outcome = _run(command, given)
        if isinstance(outcome, int):
            return outcome
        return _print(command, outcome)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _give_up_output()
        return NO_READER


def _run(command: Command, given: argparse.Namespace) -> Outcome | int:
    """The outcome, or the status if there is nothing to print but what was written to stderr."""
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # it warns of the names of its own functions
    logging.getLogger("recfx").setLevel(logging.INFO)  # it says what takes a while
    try:
        with _prints_to_stderr():
            from recfx.commandline.actions import ACTIONS  # not above: torch takes seconds, --help and mistakes none
            from recfx.commandline.factory import make

            return ACTIONS[command.name](given, *([make(given.factory)] if command.has_factory else []))
    except (NoModelError, WrongUsage) as error:
        if given.traceback and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        hint = "; --traceback shows where" if error.__cause__ is not None and not given.traceback else ""
        print(f"{_PROGRAM} {command.name}: error: {as_typed(str(error), given)}{hint}", file=sys.stderr)
        raise SystemExit(NO_MODEL) from None
    except (RecfxError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        if given.traceback:
            traceback.print_exception(error)
        print(f"{_PROGRAM} {command.name}: {as_typed(str(error), given)}", file=sys.stderr)
        return NOT_OK


def _print(command: Command, outcome: Outcome) -> int:
    """Colours and the terminal's width in a terminal, plain text elsewhere, as wide as ``COLUMNS`` says or as it needs
    to be. Returns the exit status.
    """
    try:
        _encode_everything()
        has_width = sys.stdout is not None and (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit())
        if has_width and not isinstance(outcome.output, str):
            from rich.console import Console

            Console(highlight=False, markup=False, emoji=False).print(outcome.output)
        else:
            print(outcome.output, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _give_up_output()
        print(f"{_PROGRAM} {command.name}: the output cannot be written: {error.strerror}", file=sys.stderr)
        return NOT_OK
    return outcome.status


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=f"A graph-rewriting compiler pass for TorchRec.\n\n{_FACTORY}",
        epilog=f"example:\n  {_PROGRAM} explain model.py:make_model\n\n{_STATUSES}",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"recfx {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        subparser = commands.add_parser(
            command.name,
            help=command.help,
            description=textwrap.fill(command.description, _WIDTH) + f"\n\n{_FACTORY}" * command.has_factory,
            epilog=f"example:\n  {_PROGRAM} {command.example}\n\n{_STATUSES}",
            formatter_class=raw,
        )
        if command.has_factory:
            subparser.add_argument("factory", metavar="module:factory", help="returns a model, or (model, sample)")
        for argument in command.arguments:
            subparser.add_argument(argument.name, **argument.settings)
        subparser.add_argument("--traceback", action="store_true", help="also print where an error was raised")
    return parser


@contextlib.contextmanager
def _prints_to_stderr() -> Iterator[None]:
    """What is printed inside goes to stderr: by Python code, by C++ code, and by processes that are started."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor, errors = sys.stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation):  # closed by the shell, or replaced by something that is no file
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    saved = os.dup(descriptor)
    os.dup2(errors, descriptor)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, descriptor)
        os.close(saved)


def _encode_everything() -> None:
    """A name that the encoding of the terminal or the pipe does not have is printed as a backslash escape."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does anyway


def _give_up_output() -> None:
    """Nothing reads stdout any more: let Python's last flush go nowhere, instead of complaining."""
    with contextlib.suppress(OSError, AttributeError, io.UnsupportedOperation), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
