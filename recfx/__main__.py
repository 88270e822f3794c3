"""``python -m recfx explain module:factory``: the conversion report from a shell, for people and for CI.

The factory takes no argument and returns a model, or ``(model, sample)``. Exit status: 0 if the report is ok, 1 if it
is not, 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

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
    report = explain(model, sample)
    if given.html is not None:
        given.html.write_text(report.to_html(), encoding="utf-8")
    print(report.to_json() if given.json else report)
    return 0 if report.ok else 1


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
    return found


if __name__ == "__main__":
    sys.exit(main())
