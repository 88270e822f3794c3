"""``python -m recfx explain``: the conversion report."""

from __future__ import annotations

import argparse
from pathlib import Path

from recfx.commandline.command import DONE, NOT_OK, Command, Outcome, add_conversion, add_json, request
from recfx.commandline.factory import Made
from recfx.inspect.drawing.draw import write_text
from recfx.inspect.explain import explain


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write an HTML page")
    parser.add_argument(
        "--tables", choices=("groups", "all"), default="groups", help="one line per group of like tables, or per table"
    )
    add_conversion(parser)


def _run(given: argparse.Namespace, made: Made) -> Outcome:
    report = explain(made.model, made.sample, tables=given.tables, **request(given))
    if given.html is not None:
        write_text(given.html, report.to_html())
    return Outcome(report.to_json() if given.json else report, DONE if report.ok else NOT_OK)


COMMAND = Command(
    name="explain",
    help="what a conversion does, or did, to a model",
    description="Print what a conversion does to a model, or did to one that is converted: what is refused, what "
    "deserves a warning, every collection and table. The exit status is 1 if something is refused.",
    example="explain model.py:make_model --html report.html",
    add_arguments=_add_arguments,
    run=_run,
)
