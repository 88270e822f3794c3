"""recfx from a shell, for people and for CI.

``python -m recfx explain module:factory`` prints the conversion report, and
``python -m recfx export module:factory FILE`` exports a model, or with ``--checkpoint`` what was saved of it.

The factory takes no argument and returns a model, or ``(model, sample)``. Exit status: 0 if the report is ok or the
file is written, 1 if not, 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from recfx.errors import RecfxError
from recfx.exporter.export import export
from recfx.inspect.explain import explain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: those of the command, without the program's name. Default: those of the command line.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        model, sample = _model_and_sample(given.factory)
    except UsageError as error:
        parser.error(str(error))
    if given.command == "export":
        if sample is None:
            parser.error(f"{given.factory} returns no sample: export needs (model, sample)")
        return _export(parser, given, model, sample)
    return _explain(given, model, sample)


def _explain(given: argparse.Namespace, model: nn.Module, sample: Any) -> int:
    report = explain(model, sample)
    if given.html is not None:
        given.html.write_text(report.to_html(), encoding="utf-8")
    print(report.to_json() if given.json else report)
    return 0 if report.ok else 1


def _export(parser: argparse.ArgumentParser, given: argparse.Namespace, model: nn.Module, sample: Any) -> int:
    try:
        quantize = _quantize(given.quantize)
    except UsageError as error:
        parser.error(str(error))
    try:
        report = export(
            model, given.file, sample, quantize=quantize, format=given.format, portable=given.portable,
            checkpoint=given.checkpoint,
        )  # fmt: skip
    except RecfxError as error:
        print(error, file=sys.stderr)
        return 1
    print(report)
    return 0


def _quantize(given: Sequence[str]) -> str | dict[str, str | None] | None:
    """``int8`` for all tables, or ``table=int8`` for each of some."""
    pairs = [each.rpartition("=") for each in given]
    plain = [form for table, _, form in pairs if not table]
    if plain and len(given) > 1:
        raise UsageError("--quantize takes one format for all tables, or table=format for each of some")
    if twice := sorted({table for table, _, _ in pairs if sum(table == other for other, _, _ in pairs) > 1}):
        raise UsageError(f"--quantize names {', '.join(twice)} more than once")
    return plain[0] if plain else {table: form for table, _, form in pairs} or None


class UsageError(Exception):
    """The command line does not name a function that makes a model."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recfx", description="A graph-rewriting compiler pass for TorchRec."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("explain", help="what a conversion does, or did, to a model")
    command.add_argument("factory", metavar="module:factory", help="returns a model, or (model, sample)")
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.add_argument("--html", metavar="FILE", type=Path, help="also write an HTML page")
    command = commands.add_parser("export", help="write a model into a file that a server loads without Python")
    command.add_argument("factory", metavar="module:factory", help="returns (model, sample)")
    command.add_argument("file", metavar="FILE", type=Path, help="the file to write")
    command.add_argument("--checkpoint", metavar="DIR", type=Path, help="export what save_checkpoint saved there")
    command.add_argument(
        "--quantize", metavar="[TABLE=]FORMAT", action="append", default=[], help="fp16, int8 or int4; may be repeated"
    )
    command.add_argument("--format", default="torchscript", help="of the file (default: torchscript)")
    command.add_argument("--not-portable", dest="portable", action="store_false", help="use recfx's own operators")
    return parser


def _model_and_sample(name: str) -> tuple[nn.Module, Any]:
    made = _factory(name)()
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made[0], made[1]
    raise UsageError(f"{name} returns a {type(made).__name__}, not a model or (model, sample)")


def _factory(name: str) -> Callable[[], object]:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"{name!r} is not module:factory")
    if module_name.startswith(".") or "/" in module_name:
        raise UsageError(f"name the module {module_name!r} as it is imported: package.module, not the path of a file")
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but something that it imports does not
        raise UsageError(f"there is no module {module_name!r}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    if isinstance(found, nn.Module) or not callable(found):
        raise UsageError(f"{name} is a {type(found).__name__}, not a function that returns a model")
    if needed := _needed_arguments(found):
        raise UsageError(f"{name} needs arguments ({', '.join(needed)}): name a function that takes none")
    return found


def _needed_arguments(function: Callable[..., object]) -> list[str]:
    """Names of the arguments without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # built-in functions may have none
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]


if __name__ == "__main__":
    sys.exit(main())
