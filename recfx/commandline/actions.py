"""What the commands of ``python -m recfx`` do and print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import nn
from torchrec.distributed.planner import Topology

from recfx.api import compare_plans, convert, cost, draw, explain, export, plan, trace, verify
from recfx.collections.converted_collection import converted_collections
from recfx.collections.sharding.whole_plan import MOST_RANKS
from recfx.commandline.command import DONE, NOT_OK, Outcome, WrongUsage
from recfx.commandline.factory import Made
from recfx.commandline.given_file import as_typed
from recfx.commandline.request import by_name, constraints, for_tables, request
from recfx.doctor.examine import device_here, examine
from recfx.doctor.show import to_text
from recfx.errors import ConversionError
from recfx.inspect.drawing.draw import write_text
from recfx.inspect.report_data import CollectionReport
from recfx.inspect.step_diff import diff_steps
from recfx.inspect.wording import name_of
from recfx.planner.plan_file import plain_plan, read_plan
from recfx.planner.priced_plan import price_of
from recfx.planner.pricing.hardware import NAMED, Hardware
from recfx.planner.topology import NpuTopology, plain_topology

DRAW_VERSION = EXPORT_VERSION = GRAPH_VERSION = VERIFY_VERSION = "1"  # of the JSON that a command prints

# --- what several commands do


def _converted(given: argparse.Namespace, made: Made) -> nn.Module:
    """The model, converted as the options say; it stays as it is if it is converted already."""
    return convert(made.model, made.sample, verify=False, **request(given, made.model))


def _topology(given: argparse.Namespace, ranks: int | None) -> Topology | NpuTopology | Hardware | None:
    """What ``--hardware`` says of so many ranks, as ``recfx.cost`` and ``recfx.draw`` take it."""
    if ranks is None:
        return NAMED.get(given.hardware)
    if ranks < 1:
        raise WrongUsage(f"--ranks {ranks}: there must be one at least")
    if ranks > MOST_RANKS:
        raise WrongUsage(f"--ranks {ranks}: there can be {MOST_RANKS:,} at most")
    return plain_topology(ranks, {"ascend_910b": "npu", "h100": "cuda"}.get(given.hardware, "cpu"))


def _sharding(given: argparse.Namespace) -> dict[str, Any]:
    """What ``--plan``, ``--ranks`` and ``--hardware`` say, as ``recfx.explain``, ``cost`` and ``draw`` take it."""
    if given.plan is None:
        return {"topology": _topology(given, given.ranks)}
    planned = read_plan(given.plan.path)
    ranks = given.ranks if planned.world_size is None else planned.world_size
    if given.ranks not in (None, ranks):
        raise ConversionError(
            f"--ranks is {given.ranks}, but the plan in {given.plan} was made for {ranks:,}.",
            reason="plan_rank",
            what_to_do="leave --ranks out, or make a plan for as many with the command plan.",
        )
    topology = _topology(given, ranks if given.ranks or given.hardware else None)
    return {"topology": topology, "plan": planned, "world_size": ranks}


# --- explain, graph, draw


def _explain(given: argparse.Namespace, made: Made) -> Outcome:
    sharding = _sharding(given)
    if isinstance(sharding["topology"], Hardware):
        raise WrongUsage("--hardware says what the ranks are: it needs --ranks, or a --plan that says their number")
    report = explain(
        made.model, made.sample, tables=given.tables, verify=given.verify, whole_graph=given.whole_graph, **sharding,
        **request(given, made.model),
    )  # fmt: skip
    if given.html is not None:
        write_text(given.html.path, report.to_html())
    return Outcome(report.to_json() if given.json else report, DONE if report.ok else NOT_OK)


def _graph(given: argparse.Namespace, made: Made) -> Outcome:
    model = _converted(given, made)
    if given.diff is not None:
        if given.after is not None or given.collection is not None:
            raise WrongUsage("--diff is about all collections, and has steps of its own: leave out the other options")
        changed = diff_steps(model, *given.diff)
        return Outcome(json.dumps({"version": GRAPH_VERSION, "diff": changed}) if given.json else changed.rstrip("\n"))
    collections = [one for one in explain(model).collections if one.passes]
    if given.collection is not None:
        path = "" if given.collection == name_of("") else given.collection
        names = ", ".join(name_of(one.path) for one in collections)
        collections = [one for one in collections if path in one.paths]
        if not collections:
            raise WrongUsage(f"there is no converted collection {given.collection!r}; there are: {names}")
    graphs = [(one, _graph_after(one, given.after)) for one in collections]
    if given.json:
        plain = [
            {"paths": list(one.paths), "graph": graph, "passes": [asdict(one_pass) for one_pass in one.passes]}
            for one, graph in graphs
        ]
        return Outcome(json.dumps({"version": GRAPH_VERSION, "collections": plain}, indent=2))
    headed = len(graphs) > 1
    return Outcome("\n\n".join((f"# {name_of(one.path)}\n" if headed else "") + graph for one, graph in graphs))


def _graph_after(collection: CollectionReport, name: str | None) -> str:
    """The graph after one pass, or after the last one."""
    graphs = {one.name: one.graph for one in collection.passes}
    if name is None:
        return collection.passes[-1].graph
    if name not in graphs:
        raise WrongUsage(f"there is no pass {name!r}; there are: {', '.join(graphs)}")
    return graphs[name]


def _draw(given: argparse.Namespace, made: Made) -> Outcome:
    sharding = _sharding(given)
    if given.whole_graph and (given.ranks is not None or given.plan is not None):
        raise WrongUsage("--whole-graph does not fit --ranks and --plan: the code around collections is not sharded")
    model = _converted(given, made)
    if given.whole_graph:
        if made.sample is None:
            raise WrongUsage(f"{made.name} returns no sample: --whole-graph traces it, and needs (model, sample)")
        model = trace(model, made.sample)
    draw(model, given.file.path, sample=made.sample, **sharding)
    written = {"version": DRAW_VERSION, "path": str(given.file), "bytes": given.file.path.stat().st_size}
    return Outcome(json.dumps(written, indent=2) if given.json else f"{given.file}: {written['bytes']:,} bytes")


# --- plan, cost


def _plan(given: argparse.Namespace, made: Made) -> Outcome:
    topology: Any = _topology(given, given.ranks)
    limits = constraints(given.constrain)
    made_plan = plan(_converted(given, made), topology, limits, batch_size=given.batch_size)
    text = json.dumps(plain_plan(made_plan), indent=1)
    write_text(given.file.path, f"{text}\n")
    return Outcome(text if given.json else "\n".join(f"{price.message}" for price in price_of(made_plan)))


def _cost(given: argparse.Namespace, made: Made) -> Outcome:
    model = _converted(given, made)
    model.train(not given.eval)
    expressions = cost(model, sample=made.sample, **_sharding(given))
    if given.expressions:
        return Outcome(expressions.to_json() if given.json else str(expressions))
    numbers = expressions.at(B=given.batch_size, L=_lengths(given))
    return Outcome(numbers.to_json() if given.json else numbers)


def _compare(given: argparse.Namespace, made: Made) -> Outcome:
    plans = {str(file): read_plan(file.path) for file in given.plans}
    ranks = {given.ranks if plan_read.world_size is None else plan_read.world_size for plan_read in plans.values()}
    topology = _topology(given, ranks.pop() if len(ranks) == 1 else None) if given.hardware else None
    model = _converted(given, made).train(not given.eval)
    compared = compare_plans(
        model, plans, topology, world_size=given.ranks, B=given.batch_size, L=_lengths(given), sample=made.sample
    )
    return Outcome(compared.to_json() if given.json else compared)


def _lengths(given: argparse.Namespace) -> dict[str, float]:
    """As ``recfx.cost`` takes them and checks their names."""
    return by_name("--length", given.length, float, "is not a number")


# --- verify, export


def _verify(given: argparse.Namespace, made: Made) -> Outcome:
    if made.sample is None:
        raise WrongUsage(f"{made.name} returns no sample: verify runs the model, and needs (model, sample)")
    if converted_collections(made.model):
        raise WrongUsage(f"{made.name} returns a converted model: verify needs the original, and converts it itself")
    report = verify(made.model, _converted(given, made), made.sample, rtol=given.rtol, atol=given.atol)
    plain = {"version": VERIFY_VERSION, "ok": report.ok, **asdict(report)}
    return Outcome(json.dumps(plain, indent=2) if given.json else str(report), DONE if report.ok else NOT_OK)


def _export(given: argparse.Namespace, made: Made) -> Outcome:
    if made.sample is None:
        raise WrongUsage(f"{made.name} returns no sample: export needs (model, sample)")
    model = made.model if converted_collections(made.model) else _converted(given, made)
    quantize = for_tables("--quantize", given.quantize, "format")
    report = export(
        model, given.file.path, made.sample, quantize=quantize, format=given.format,
        portable=given.portable, checkpoint=given.checkpoint and given.checkpoint.path, submodule=given.submodule,
    )  # fmt: skip
    plain = {
        "version": EXPORT_VERSION,
        "path": str(given.file),
        "format": report.format,
        "bytes": report.bytes,
        "output_error": report.output_error,
        "libraries": [str(library) for library in report.libraries],
        "notes": [{"code": note.code, "message": note.message, "what_to_do": note.what_to_do} for note in report.notes],
        "tables": [asdict(table) for table in report.tables],
        "graph": report.graph,
    }
    return Outcome(json.dumps(plain, indent=2) if given.json else as_typed(str(report), given))


# --- doctor


def _doctor(given: argparse.Namespace) -> Outcome:
    report, written = examine(given.device or device_here(), given.out, given.quick)
    paths = "\n".join(map(str, written))
    output = report.to_json() if given.json else f"{to_text(report)}\n\n{paths}"
    return Outcome(output, DONE if report.ok and report.complete else NOT_OK)


ACTIONS: dict[str, Callable[..., Outcome]] = {
    "explain": _explain,
    "graph": _graph,
    "draw": _draw,
    "plan": _plan,
    "cost": _cost,
    "compare": _compare,
    "verify": _verify,
    "export": _export,
    "doctor": _doctor,
}
"""By the name of the command. Each takes the arguments and, if there is a factory, what that made."""
