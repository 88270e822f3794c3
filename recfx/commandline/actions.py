"""What the commands of ``python -m recfx`` do. Each returns what is printed, and whether all is well."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from torch import nn

import recfx.api as recfx
from recfx.collections.converted_collection import converted_collections
from recfx.collections.sharding.plan import MOST_RANKS
from recfx.commandline import UsageError
from recfx.commandline.doctor.examine import device_here, examine
from recfx.commandline.factory import Made, make
from recfx.inspect.drawing.draw import write_text
from recfx.inspect.report_data import name_of
from recfx.planner.plan_file import plain_plan, read_plan
from recfx.planner.priced_plan import price_of
from recfx.planner.pricing.hardware import NAMED
from recfx.planner.topology import plain_topology

VERSION = "1"
"""The version of the JSON that ``draw`` and ``export`` print; reports and plans have their own."""

Outcome = tuple[object, bool]


def explain(given: argparse.Namespace) -> Outcome:
    """Print the report; not well if something is refused, or the converted model is not as the original."""
    made = make(given.factory)
    report = recfx.explain(
        made.model, made.sample, verify=given.verify, whole_graph=given.whole_graph,
        **_sharding(given), **_conversion(given),
    )  # fmt: skip
    if given.html is not None:
        write_text(given.html, report.to_html())
    if given.json:
        return report.to_json(), report.ok
    if given.graph and report.ok:
        graphs = [(one.path, one.graph) for one in report.collections if one.graph]
        return "\n\n".join(f"# {name_of(path)}\n{graph}" for path, graph in graphs), True
    return report, report.ok


def draw(given: argparse.Namespace) -> Outcome:
    """Write the page."""
    made = make(given.factory)
    sharding = _sharding(given)
    if given.whole_graph and sharding:
        raise UsageError("--whole-graph does not fit --ranks and --plan: the code around collections is not sharded")
    model = _converted(given, made)
    if given.whole_graph:
        model = recfx.trace(model, _sample(made))
    if not sharding and given.hardware:
        sharding = {"topology": NAMED[given.hardware]}
    recfx.draw(model, given.file, sample=made.sample, **sharding)
    return _written(given, {}, f"{given.file}: {given.file.stat().st_size:,} bytes")


def plan(given: argparse.Namespace) -> Outcome:
    """Write the plan, and print how it was chosen."""
    topology: Any = _topology(given.ranks, given.hardware)
    made = recfx.plan(_converted(given, make(given.factory)), topology, batch_size=given.batch_size)
    text = json.dumps(plain_plan(made), indent=1)
    write_text(given.file, f"{text}\n")
    return text if given.json else "\n".join(price.message for price in price_of(made)), True


def export(given: argparse.Namespace) -> Outcome:
    """Write the file, if it answers the sample as the model does."""
    made = make(given.factory)
    quantize: Any = dict(text.rpartition("=")[::2] for text in given.quantize)
    if len(quantize) < len(given.quantize) or ("" in quantize and len(quantize) > 1):
        raise UsageError("--quantize takes one format for all tables, or TABLE=FORMAT once for each of some")
    report = recfx.export(
        _converted(given, made), given.file, _sample(made), quantize=quantize.get("", quantize or None),
        format=given.format, portable=given.portable, checkpoint=given.checkpoint, submodule=given.submodule,
    )  # fmt: skip
    more = {
        "format": report.format,
        "output_error": report.output_error,
        "libraries": [str(library) for library in report.libraries],
        "notes": [{"code": note.code, "message": note.message, "what_to_do": note.what_to_do} for note in report.notes],
        "tables": [asdict(table) for table in report.tables],
        "graph": report.graph,
    }
    return _written(given, more, str(report))


def doctor(given: argparse.Namespace) -> Outcome:
    """Look at the machine."""
    report = examine(given.device or device_here(), given.quick)
    return report.to_json() if given.json else str(report), report.ok and report.complete


def _written(given: argparse.Namespace, more: dict[str, Any], text: str) -> Outcome:
    facts = {"version": VERSION, "path": str(given.file), "bytes": given.file.stat().st_size, **more}
    return json.dumps(facts, indent=2) if given.json else text, True


def _sample(made: Made) -> Any:
    if made.sample is None:
        raise UsageError(f"{made.name} returns no sample, which this needs: return (model, sample)")
    return made.sample


def _conversion(given: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``recfx.convert``."""
    asked = {
        "on_unsupported": "keep" if getattr(given, "keep", True) else "error",
        "managed_collisions": given.managed_collisions,
        "backend": given.backend,
        "device": given.device,
    }
    return asked | ({"hashing": recfx.HashConfig.raw_ids()} if given.raw_ids else {})


def _converted(given: argparse.Namespace, made: Made) -> nn.Module:
    """The model, converted as the options say; one that is converted already stays as it is, unless they say more."""
    if converted_collections(made.model) and given.command == "export":
        return made.model
    return recfx.convert(made.model, made.sample, verify=False, **_conversion(given))


def _topology(ranks: int, hardware: str | None) -> Any:
    if not 1 <= ranks <= MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: there must be one at least, and can be {MOST_RANKS:,} at most")
    return plain_topology(ranks, {"ascend_910b": "npu", "h100": "cuda"}.get(hardware or "", "cpu"))


def _sharding(given: argparse.Namespace) -> dict[str, Any]:
    """What ``--plan``, ``--ranks`` and ``--hardware`` say, as ``recfx.explain`` and ``recfx.draw`` take it."""
    if given.plan is None:
        if given.ranks is None and given.hardware and given.command == "explain":
            raise UsageError("--hardware says what the ranks are: it needs --ranks, or a --plan")
        return {} if given.ranks is None else {"topology": _topology(given.ranks, given.hardware)}
    read = read_plan(given.plan)
    ranks = given.ranks if read.world_size is None else read.world_size
    if given.ranks not in (None, ranks):
        raise UsageError(f"--ranks is {given.ranks}, but {given.plan} was made for {ranks:,} ranks")
    topology = _topology(ranks, given.hardware) if ranks and (given.ranks or given.hardware) else None
    return {"topology": topology, "plan": read, "world_size": ranks}
