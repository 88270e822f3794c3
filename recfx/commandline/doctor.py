"""``python -m recfx doctor``: the command that is about a machine, and not about a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from recfx.commandline.command import Argument, Command
from recfx.doctor.packages import DEVICES


def _device(text: str) -> str:
    """Check the device that an option names; argparse turns the error into a message and exit status 2."""
    kind, _, number = text.partition(":")
    if kind not in DEVICES or not ((number.isascii() and number.isdigit()) or text == kind):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DEVICES)}, nor one of them with a number")
    return text


DOCTOR = Command(
    "doctor",
    help="is this machine set up, are the kernels right here, and how fast are they",
    description="Look at what is installed, run every kernel against its reference on the device, train a small model "
    "there, and measure how fast the kernels are. Writes a page and JSON to attach to a bug report. The exit status is "
    "1 if something is missing or wrong.",
    example="doctor --device npu",
    arguments=(
        Argument("--json", action="store_true", help="print JSON instead of text"),
        Argument(
            "--device",
            type=_device,
            metavar="DEVICE",
            help="npu, cuda or cpu, perhaps with a number, as in npu:1 (default: the first of these that is here)",
        ),
        Argument("--quick", action="store_true", help="fewer shapes and shorter measurements: a few seconds"),
        Argument(
            "--out",
            metavar="PATH",
            type=Path,
            default=Path(),
            help="a directory, or the path of the two files without its end (default: recfx-doctor here)",
        ),
    ),
    has_factory=False,
)
