"""``python -m recfx export``: a model as a file that a server loads without Python."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from recfx.commandline.command import Command, Outcome, WrongUsage, add_json
from recfx.commandline.factory import Made
from recfx.exporter.export import export
from recfx.exporter.report import ExportReport

EXPORT_VERSION = "1"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the file to write")
    add_json(parser)
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="export what save_checkpoint saved there")
    parser.add_argument(
        "--quantize", metavar="[TABLE=]FORMAT", action="append", default=[], help="fp16, int8 or int4; may be repeated"
    )
    parser.add_argument("--format", default="torchscript", help="of the file (default: torchscript)")
    parser.add_argument("--not-portable", dest="portable", action="store_false", help="use recfx's own operators")


def _run(given: argparse.Namespace, made: Made) -> Outcome:
    if made.sample is None:
        raise WrongUsage(f"{made.name} returns no sample: export needs (model, sample)")
    report = export(
        made.model, given.file, made.sample, quantize=_quantize(given.quantize), format=given.format,
        portable=given.portable, checkpoint=given.checkpoint,
    )  # fmt: skip
    return Outcome(_json(report) if given.json else str(report))


def _quantize(given: Sequence[str]) -> str | dict[str, str | None] | None:
    """``int8`` for all tables, or ``table=int8`` for each of some."""
    pairs = [each.rpartition("=") for each in given]
    plain = [form for table, _, form in pairs if not table]
    if plain and len(given) > 1:
        raise WrongUsage("--quantize takes one format for all tables, or table=format for each of some")
    if twice := sorted({table for table, _, _ in pairs if sum(table == other for other, _, _ in pairs) > 1}):
        raise WrongUsage(f"--quantize names {', '.join(twice)} more than once")
    return plain[0] if plain else {table: form for table, _, form in pairs} or None


def _json(report: ExportReport) -> str:
    return json.dumps(
        {
            "version": EXPORT_VERSION,
            "path": str(report.path),
            "format": report.format,
            "bytes": report.bytes,
            "output_error": report.output_error,
            "libraries": [str(library) for library in report.libraries],
            "notes": [
                {"code": note.code, "message": note.message, "what_to_do": note.what_to_do} for note in report.notes
            ],
            "tables": [asdict(table) for table in report.tables],
            "graph": report.graph,
        },
        indent=2,
    )


COMMAND = Command(
    name="export",
    help="write a model into a file that a server loads without Python",
    description="Write a model, as it answers in eval mode, into a file that a server loads without Python; with "
    "--checkpoint, what was saved of it. The file is written only if it answers the sample as the model does; "
    "otherwise the exit status is 1.",
    example="export model.py:make_model model.pt --quantize int8",
    add_arguments=_add_arguments,
    run=_run,
)
