"""``python -m recfx``: reads the command line, makes the model, runs one command and returns its exit status.

Standard output carries the result alone, whatever the model's code prints, and may be closed at any time.
"""

import argparse
import contextlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recfx.commandline import UsageError
from recfx.commandline.doctor.packages import DEVICES
from recfx.errors import RecfxError
from recfx.versions import __version__

DONE, NOT_OK, USAGE, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141
HARDWARE = ("ascend_910b", "h100", "cpu")

_PROGRAM = "python -m recfx"
_FACTORY = """\
The factory takes no arguments and returns a model, or (model, sample), where sample is one call of the model: a tuple
of its positional arguments, or recfx.Sample(dense, labels=labels). It is named as package.module:factory, or as
path/to/file.py:factory. A model that it has converted itself stays as it is."""
_STATUSES = """\
exit status:
  0    all is well
  1    something is refused, missing or wrong, or a file cannot be written
  2    the command line is wrong, or the factory gives no model
  130  interrupted by Ctrl-C
  141  nothing reads the output any more"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; ``SystemExit`` for a wrong command line, and for ``--help``."""
    given = _parser().parse_args(arguments)
    try:
        logging.getLogger("torch.fx").setLevel(logging.ERROR)  # it warns of the names of its own functions
        logging.getLogger("recfx").setLevel(logging.INFO)  # it says what takes a while
        with _prints_to_stderr():
            from recfx.commandline import actions  # not above: torch takes seconds, --help and mistakes none

            output, is_ok = getattr(actions, given.command)(given)
        _print(output)
        return DONE if is_ok else NOT_OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush would complain
        return NO_READER
    except UsageError as error:
        if given.traceback and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        hint = "; --traceback shows where" if error.__cause__ is not None and not given.traceback else ""
        print(f"{_PROGRAM} {given.command}: error: {error}{hint}", file=sys.stderr)
        raise SystemExit(USAGE) from None
    except (RecfxError, OSError) as error:
        if given.traceback:
            traceback.print_exception(error)
        print(f"{_PROGRAM} {given.command}: {error}", file=sys.stderr)
        return NOT_OK


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

    def command(name: str, help: str, example: str, has_factory: bool = True) -> argparse.ArgumentParser:
        epilog = f"example:\n  {_PROGRAM} {example}\n\n{_STATUSES}"
        made = commands.add_parser(name, help=help, description=f"{help}.", epilog=epilog, formatter_class=raw)
        if has_factory:
            made.description = f"{help}.\n\n{_FACTORY}"
            made.add_argument("factory", metavar="module:factory", help="returns a model, or (model, sample)")
        made.add_argument("--json", action="store_true", help="print JSON instead of text")
        made.add_argument("--traceback", action="store_true", help="also print where an error was raised")
        return made

    explain = command("explain", "What a conversion does or did to a model", "explain model.py:make --html report.html")
    explain.add_argument("--html", metavar="FILE", type=_path, help="also write an HTML page")
    explain.add_argument("--graph", action="store_true", help="print the rewritten graph of each collection instead")
    explain.add_argument("--whole-graph", action="store_true", help="as a graph of the whole model; needs a sample")
    explain.add_argument(
        "--verify", action=argparse.BooleanOptionalAction,
        help="compare with the original (default: if there is a sample, and the model is not large)",
    )  # fmt: skip
    draw = command("draw", "A page with the graphs, before and after conversion", "draw model.py:make model.html")
    draw.add_argument("file", metavar="FILE", type=_path, help="the .html file to write")
    draw.add_argument("--whole-graph", action="store_true", help="with the code around collections; needs a sample")
    plan = command(
        "plan", "Write the sharding plan that recfx.plan makes, as JSON",
        "plan model.py:make plan.json --ranks 16 --hardware ascend_910b",
    )  # fmt: skip
    plan.add_argument("file", metavar="FILE", type=_path, help="the file to write")
    plan.add_argument("--batch-size", metavar="B", type=int, default=512, help="samples per rank (default: 512)")
    for sharded in (explain, draw, plan):
        if sharded is not plan:
            sharded.add_argument("--plan", metavar="FILE", type=_path, help="as this plan would shard it")
        sharded.add_argument("--hardware", choices=HARDWARE, help="what the ranks are (default: CPUs)")
        sharded.add_argument(
            "--ranks", metavar="W", type=int, required=sharded is plan, help="for so many, which need not be there"
        )
        sharded.add_argument("--keep", action="store_true", help="leave what cannot be converted as it is")
    export = command(
        "export", "Write a model into a file that a server loads without Python",
        "export model.py:make model.pt --quantize int8",
    )  # fmt: skip
    export.add_argument("file", metavar="FILE", type=_path, help="the file to write")
    export.add_argument("--checkpoint", metavar="DIR", type=_path, help="export what save_checkpoint saved there")
    export.add_argument("--submodule", metavar="PATH", default="", help="where the model is in the one that was saved")
    export.add_argument(
        "--quantize", metavar="[TABLE=]FORMAT", action="append", default=[], help="fp16, int8 or int4; may be repeated"
    )
    export.add_argument("--format", default="torchscript", help="of the file: torchscript (default) or pt2")
    export.add_argument("--not-portable", dest="portable", action="store_false", help="use recfx's own operators")
    for converts in (explain, draw, plan, export):
        converts.add_argument("--raw-ids", action="store_true", help="convert with HashConfig.raw_ids()")
        converts.add_argument(
            "--managed-collisions", choices=("keep", "convert"), default="keep",
            help="convert: also TorchRec's managed-collision collections, whose ids keep their rows",
        )  # fmt: skip
        converts.add_argument("--backend", metavar="NAME", default="auto", help="kernel target (default: auto)")
        converts.add_argument("--device", help="where the converted model goes (default: it stays where it is)")
    doctor = command(
        "doctor",
        "Is this machine set up, are the kernels right here, and how fast are they",
        "doctor --device npu",
        has_factory=False,
    )
    doctor.add_argument("--device", type=_device, help="npu, cuda or cpu, also as npu:1 (default: the first here)")
    doctor.add_argument("--quick", action="store_true", help="fewer cases and shorter measurements: a few seconds")
    return parser


def _path(text: str) -> Path:
    """The path as the shell means it, wherever the user's factory goes."""
    try:
        return Path(text).absolute()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: the current directory cannot be found: {error.strerror}") from error


def _device(text: str) -> str:
    kind, _, number = text.partition(":")
    if kind not in DEVICES or not ((number.isascii() and number.isdigit()) or text == kind):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DEVICES)}, nor one of them with a number")
    return text


def _print(output: Any) -> None:
    """Colours and the terminal's width in a terminal, plain text elsewhere, as wide as ``COLUMNS`` says."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that the encoding of the terminal does not have
    has_width = sys.stdout is not None and (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit())
    if has_width and not isinstance(output, str):
        from rich.console import Console

        Console(highlight=False, markup=False, emoji=False).print(output)
    else:
        print(output, flush=True)


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
