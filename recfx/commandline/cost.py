"""``python -m recfx cost``: what each node costs per step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from recfx.commandline.command import Command, Outcome, WrongUsage, add_conversion, add_json, converted
from recfx.commandline.factory import Made
from recfx.commandline.ranks import add_hardware, add_ranks, topology_of
from recfx.inspect.cost import cost
from recfx.planner.pricing.values import BATCH_SIZE, LENGTH


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument(
        "--batch-size", metavar="B", type=int, default=BATCH_SIZE, help="samples per rank (default: %(default)s)"
    )
    parser.add_argument(
        "--length",
        metavar="[FEATURE=]L",
        action="append",
        default=[],
        help=f"mean number of ids per sample, of all features or of one; may be repeated (default: {LENGTH:g})",
    )
    add_hardware(parser)
    add_ranks(parser)
    parser.add_argument("--eval", action="store_true", help="a step in eval mode, without a backward")
    parser.add_argument("--expressions", action="store_true", help="print expressions in B, W and L_f, and no times")
    add_conversion(parser)


def _run(given: argparse.Namespace, made: Made) -> Outcome:
    model = converted(given, made)
    model.train(not given.eval)
    found = cost(model, topology_of(given))
    if given.expressions:
        return Outcome(found.to_json() if given.json else str(found))
    numbers = found.at(B=given.batch_size, L=_lengths(given.length, found.features))
    return Outcome(numbers.to_json() if given.json else str(numbers))


def _lengths(given: Sequence[str], features: Sequence[str]) -> dict[str, float]:
    """One number per feature; a number without a feature is for all that are not named."""
    named: dict[str, float] = {}
    rest = float(LENGTH)
    for each in given:
        feature, _, text = each.rpartition("=")
        try:
            length = float(text)
        except ValueError:
            raise WrongUsage(f"--length {each}: {text!r} is not a number") from None
        if feature and feature not in features:
            raise WrongUsage(f"--length {each}: the model has no feature {feature!r}; it has {', '.join(features)}")
        if feature:
            named[feature] = length
        else:
            rest = length
    return dict.fromkeys(features, rest) | named


COMMAND = Command(
    name="cost",
    help="what each node costs per step, and its predicted time",
    description="Print what each node of the converted model costs per step: bytes read and written, bytes for "
    "collectives, flops, bytes that stay, and the time that this is predicted to take.",
    example="cost model.py:make_model --batch-size 4096 --length 2 --length watched=50",
    add_arguments=_add_arguments,
    run=_run,
)
