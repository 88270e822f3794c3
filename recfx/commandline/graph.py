"""``python -m recfx graph``: the rewritten graph of each collection, after any pass, or what passes changed."""

from __future__ import annotations

import argparse
import json

from recfx.commandline.command import Command, Outcome, WrongUsage, add_conversion, add_json, converted
from recfx.commandline.factory import Made
from recfx.inspect.explain import explain
from recfx.inspect.report_data import CollectionReport
from recfx.inspect.step_diff import diff_steps
from recfx.inspect.wording import name_of

GRAPH_VERSION = "1"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument("--collection", metavar="NAME", help="only this one, by its fully qualified name")
    parser.add_argument("--after", metavar="PASS", help="after this pass instead of the last one")
    parser.add_argument(
        "--diff",
        nargs=2,
        metavar="STEP",
        help="what changed between two steps, each the name of a pass, or 'before'; of all collections",
    )
    add_conversion(parser)


def _run(given: argparse.Namespace, made: Made) -> Outcome:
    model = converted(given, made)
    if given.diff is not None:
        if given.after is not None or given.collection is not None:
            raise WrongUsage("--diff is about all collections, and has steps of its own: leave out the other options")
        changed = diff_steps(model, *given.diff)
        return Outcome(json.dumps({"version": GRAPH_VERSION, "diff": changed}) if given.json else changed.rstrip("\n"))
    report = explain(model)
    collections = [one for one in report.collections if one.passes]
    if given.collection is not None:
        wanted = "" if given.collection == name_of("") else given.collection
        names = ", ".join(name_of(one.path) for one in collections)
        collections = [one for one in collections if wanted in one.paths]
        if not collections:
            raise WrongUsage(f"there is no converted collection {given.collection!r}; there are: {names}")
    if given.json:
        found = {"version": GRAPH_VERSION, "collections": [_plain(one, given.after) for one in collections]}
        return Outcome(json.dumps(found, indent=2))
    headed = len(collections) > 1
    parts = [(f"# {name_of(one.path)}\n" if headed else "") + _graph(one, given.after) for one in collections]
    return Outcome("\n\n".join(parts))


def _graph(collection: CollectionReport, after: str | None) -> str:
    """The graph after one pass, or after the last one."""
    if after is None:
        return collection.passes[-1].graph
    for one in collection.passes:
        if one.name == after:
            return one.graph
    raise WrongUsage(f"there is no pass {after!r}; there are: {', '.join(one.name for one in collection.passes)}")


def _plain(collection: CollectionReport, after: str | None) -> dict[str, object]:
    return {
        "paths": list(collection.paths),
        "graph": _graph(collection, after),
        "passes": [{"name": one.name, "modified": one.modified, "graph": one.graph} for one in collection.passes],
    }


COMMAND = Command(
    name="graph",
    help="the rewritten graph of each collection",
    description="Print the graph that each collection is rewritten to, one node per line, or what changed between two "
    "passes.",
    example="graph model.py:make_model --diff before lower",
    add_arguments=_add_arguments,
    run=_run,
)
