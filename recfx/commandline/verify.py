"""``python -m recfx verify``: is the converted model the original one?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from recfx.collections.converted_collection import converted_collections
from recfx.commandline.command import DONE, NOT_OK, Command, Outcome, WrongUsage, add_conversion, add_json, converted
from recfx.commandline.factory import Made
from recfx.verification.verify import verify
from recfx.verification.verify_report import VerifyReport

VERIFY_VERSION = "1"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    add_conversion(parser)
    parser.add_argument("--rtol", type=float, default=1e-5, help="relative tolerance (default: %(default)g)")
    parser.add_argument("--atol", type=float, default=1e-6, help="absolute tolerance (default: %(default)g)")


def _run(given: argparse.Namespace, made: Made) -> Outcome:
    if made.sample is None:
        raise WrongUsage(f"{made.name} returns no sample: verify runs the model, and needs (model, sample)")
    if converted_collections(made.model):
        raise WrongUsage(f"{made.name} returns a converted model: verify needs the original, and converts it itself")
    report = verify(made.model, converted(given, made), made.sample, rtol=given.rtol, atol=given.atol)
    return Outcome(_json(report) if given.json else str(report), DONE if report.ok else NOT_OK)


def _json(report: VerifyReport) -> str:
    return json.dumps({"version": VERIFY_VERSION, "ok": report.ok, **asdict(report)}, indent=2)


COMMAND = Command(
    name="verify",
    help="convert a model, and compare it with the original",
    description="Convert a model and compare it with the original on its sample: outputs, gradients and one optimizer "
    "step, in train and eval mode, at two batch sizes. The exit status is 1 if they differ, or if nothing could be "
    "compared.",
    example="verify model.py:make_model --raw-ids",
    add_arguments=_add_arguments,
    run=_run,
)
