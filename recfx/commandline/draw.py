"""``python -m recfx draw``: a picture of the graphs, before and after conversion."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recfx.commandline.command import Command, Outcome, WrongUsage, add_conversion, add_json, converted
from recfx.commandline.factory import Made
from recfx.commandline.ranks import add_hardware, add_ranks, topology_of
from recfx.conversion.trace import trace
from recfx.inspect.drawing.draw import draw

DRAW_VERSION = "1"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the file to write: .html, .svg or .dot")
    add_json(parser)
    parser.add_argument("--whole-graph", action="store_true", help="with the code around collections; needs a sample")
    add_hardware(parser, "what times are predicted for (default: with --ranks, a CPU; otherwise none are)")
    add_ranks(parser)
    add_conversion(parser)


def _run(given: argparse.Namespace, made: Made) -> Outcome:
    topology = topology_of(given)
    if given.whole_graph and given.ranks is not None:
        raise WrongUsage("--whole-graph and --ranks do not fit: the code around collections is not sharded")
    model = converted(given, made)
    if given.whole_graph:
        if made.sample is None:
            raise WrongUsage(f"{made.name} returns no sample: --whole-graph traces it, and needs (model, sample)")
        model = trace(model, made.sample)
    draw(model, given.file, topology)
    written = {"version": DRAW_VERSION, "path": str(given.file), "bytes": given.file.stat().st_size}
    return Outcome(json.dumps(written, indent=2) if given.json else f"{given.file}: {written['bytes']:,} bytes")


COMMAND = Command(
    name="draw",
    help="a picture of the graphs, before and after conversion",
    description="Draw a model's graphs before and after conversion: .html is one page with every pass, what is known "
    "of each node, and a search; .svg is a picture, .dot the same for Graphviz.",
    example="draw model.py:make_model model.html",
    add_arguments=_add_arguments,
    run=_run,
)
