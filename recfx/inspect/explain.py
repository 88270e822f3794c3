"""``recfx.explain``: reports what was done to a model, or what ``convert`` would do. Changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import converted_collections
from recfx.collections.hash_collections import CONVERTED_CLASSES
from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.sharding.plan import MOST_RANKS, refuse_unknown_collections
from recfx.collections.whole_graph import WholeGraph
from recfx.collections.wrappers import unwrap, users_path, without_wrappers
from recfx.conversion.convert import as_whole_graph
from recfx.conversion.decide import Decision, decide
from recfx.conversion.request import DEFAULT_HASHING, Request, named_passes
from recfx.errors import ConversionError, Diagnostic, Severity
from recfx.errors.argument_types import typed
from recfx.hashing import HashConfig
from recfx.inspect.cost import refuse_ranks_without_plan
from recfx.inspect.describe import AsPlanned, describe, never_called
from recfx.inspect.report import REPORT_VERSION, Report
from recfx.inspect.report_data import CollectionReport, Verification
from recfx.models.classify import CONVERTED, CONVERTIBLE, REFUSED, Finding, classify
from recfx.models.conversion_record import Found, conversion_of
from recfx.models.replace_collections import unchanged
from recfx.models.resize_tables import TableResizing
from recfx.models.sample import Sample
from recfx.passes import Pass
from recfx.planner.plan import make_plan
from recfx.planner.priced_plan import price_of, world_size_of
from recfx.planner.pricing.node_facts import whole_number
from recfx.planner.topology import device_of_tables, plain_topology
from recfx.versions import __version__


@typed(ConversionError)
def explain(
    model: nn.Module,
    sample: Any = None,
    plan: ShardingPlan | None = None,
    *,
    hashing: HashConfig | Mapping[str, HashConfig | None] | None = DEFAULT_HASHING,
    topology: Topology | None = None,
    world_size: int | None = None,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    whole_graph: bool = False,
    verify: bool | None = None,
    inplace: bool = False,
    on_unsupported: Literal["error", "keep"] = "error",
    id_ranges: Mapping[str, tuple[int, int]] | None = None,
    passes: Iterable[Pass] | None = None,
    managed_collisions: Literal["keep", "convert"] = "keep",
    dedup: bool | Literal["auto"] | Mapping[str, bool | float] = "auto",
) -> Report:
    """Say what was done to ``model``, or, before conversion, what ``convert`` with the same arguments would do to it.

    What ``convert`` would refuse raises nothing, except for invalid arguments: the report lists it, with the
    reason and what to do, and is not ok. The model, its optimizers and the random state stay as they are. What
    ``convert`` would make is made and forgotten: indexes, rows that are added and, with a sample, the copies that are
    compared take memory for the time of the call.

    Example:
        >>> report = recfx.explain(Model(), sample, hashing=recfx.HashConfig.raw_ids())
        >>> report.ok, report.collections[0].status
        (True, 'convertible')
        >>> print(report)
        1 collection: 1 convertible. OK
        ...

    Args:
        model: any module, converted or not, also inside DDP and torch.compile wrappers.
        sample: one call of it, to confirm where its collections are called, and to compare what ``convert`` would make
            with the original. Not needed if the model was converted with a sample.
        plan: TorchRec's sharding plan for a model that is not sharded: the report says what it would do to the tables,
            and what is wrong with it. The nodes are those of this rank, on the devices for which ``recfx.plan`` made
            the plan, or else where the tables are. A sharded model is explained as this rank sees it.
        topology: as for ``recfx.cost``. Without ``plan``, the report is about the plan that ``recfx.plan`` makes for it
            and for what these settings make of the model; with ``plan``, its devices have the tables.
        world_size: as for ``recfx.cost``; otherwise the ranks of ``env``, or of the default process group.
        hashing, env, whole_graph, inplace, on_unsupported, id_ranges, passes, managed_collisions, dedup: as for
            ``convert``, but with ``env`` nothing is communicated.
        device, backend: as for ``convert``. The report describes the tables where they are now.
        verify: as for ``convert``: whether to compare with a sample. None: unless the parameters take more than 2 GiB.

    Raises:
        ConversionError: ``invalid_argument``, ``invalid_topology``, ``sample_required``, ``unknown_world_size``.
        InputError: ``invalid_argument``: ``world_size`` is no number of ranks.
    """
    asked = Request(
        None if sample is None else Sample.of(sample),
        hashing, plan, env, device, backend, whole_graph, verify, inplace, on_unsupported, id_ranges,
        named_passes(passes), managed_collisions, dedup, topology,
    )  # fmt: skip
    asked.check(model)
    refuse_ranks_without_plan(world_size, plan, topology)
    ranks = _ranks(asked, world_size) if asked.shards else None
    root, as_asked = model, asked
    model = _holder(model)
    records = _Records(model)
    if not _is_to_be_traced(model, records):
        asked = replace(asked, call=None)
    with unchanged(model), TableResizing(model) as resizing:
        # It was kept with the hashing requested then; the default hashing might not be refused.
        kept = records.kept if hashing is DEFAULT_HASHING else None
        decision = decide(model, asked, resizing, raises=False, kept_before=kept)
        discovery, replacements = decision.discovery, decision.replacements
        for finding in discovery.of(REFUSED) if asked.keeps else ():
            assert finding.why is not None
            finding.why = replace(finding.why, severity=Severity.WARNING)
        rollbacks = _whole_graph(model, decision, as_asked)
        planned, about_plan = (None, []) if ranks is None else _planned(model, decision, asked, *ranks)
        conversion = decision.conversion if replacements else None
        notes = [note for _, record in records.conversions for note in record.notes]
        notes += [] if conversion is None else conversion.notes
        learned = {note.path for note in notes if note.code == "managed_collision_converted"}
        collections = [
            _collection(
                finding,
                replacements.get(id(finding.module), finding.module),
                records.of_collection(finding),
                planned,
                finding.path in learned,
            )
            for finding in discovery.findings
        ]
    rollbacks += [why for _, record in records.conversions for why in record.rollbacks]
    verification = records.verification(model)
    if conversion is not None and conversion.verification is not None:
        verification = Verification.of(conversion)
    reasons = [reason for collection in collections for reason in collection.reasons]
    advice = "nothing: its code stays Python, and the collections inside it are converted anyway."
    reasons += [
        replace(why, message=f"could not be traced: {why.message}", what_to_do=advice)
        for why in dict.fromkeys(rollbacks)
    ]
    if verification.ok is False:
        message = "the converted model does not agree with the original."
        advice = "please report this, with the model."
        reasons.append(Diagnostic("verification_failed", "", message, advice, Severity.ERROR))
    reasons += [*notes, *about_plan]
    listed = {(reason.code, reason.path) for reason in reasons}
    reasons += [refusal for refusal in decision.refusals if (refusal.code, refusal.path) not in listed]
    reasons.sort(key=lambda reason: reason.severity.rank)
    renamed = functools.partial(_renamed, functools.partial(users_path, root))
    return Report(
        version=REPORT_VERSION,
        recfx_version=__version__,
        torch_version=torch.__version__,
        torchrec_version=_version("torchrec"),
        ok=all(reason.severity != Severity.ERROR for reason in reasons),
        collections=renamed(collections),
        reasons=renamed(reasons),
        verification=verification,
    )


def _renamed(name: Callable[[str], str], value: Any) -> Any:
    """Reasons, and reports of collections and tables, with other names of the modules that they are about."""
    if isinstance(value, (list, tuple)):
        return tuple(_renamed(name, one) for one in value)
    if isinstance(value, Diagnostic):
        return replace(value, path=name(value.path))
    changed = {field: _renamed(name, getattr(value, field)) for field in _WITH_REASONS if hasattr(value, field)}
    if isinstance(value, CollectionReport):
        changed["paths"] = tuple(map(name, value.paths))
    return replace(value, **changed) if changed else value


_version = functools.cache(version)  # reads files
_WITH_REASONS = ("why", "reasons", "declined", "tables")  # the fields that hold them


def _whole_graph(model: nn.Module, decision: Decision, asked: Request) -> list[Diagnostic]:
    """What a graph of the whole model leaves to Python; why there can be none is a refusal."""
    converted = model if decision.converted is None and not decision.refusals else decision.converted
    if asked.whole_graph and converted is not None and not sharded_collections(converted):
        try:
            return list(conversion_of(as_whole_graph(converted, asked.call)).rollbacks)
        except ConversionError as error:
            decision.refusals.append(error.diagnostic)
    return list(decision.discovery.rollbacks)


def _holder(model: nn.Module) -> nn.Module:
    """The module to search for collections: the whole graph of a model that is one collection has inlined it."""
    inside = unwrap(model)
    if isinstance(inside, WholeGraph) and isinstance(inside.python_model, UnshardedCollection):
        return inside.python_model
    return model


def _is_to_be_traced(model: nn.Module, records: _Records) -> bool:
    """Whether a sample tells anything: not if the model was converted with one, unless there is more to convert."""
    if not records.traced() and not isinstance(unwrap(model), WholeGraph):
        return True
    findings = (classify(module, path) for path, module in model.named_modules())
    return any(finding is not None and finding.status == CONVERTIBLE for finding in findings)


def _collection(
    finding: Finding, collection: nn.Module, record: Found | None, planned: AsPlanned | None, learned: bool
) -> CollectionReport:
    """The report of a collection, maybe as it would be; ``learned``: it took over the ids of managed collisions."""
    walked = record is not None and finding.found == "walked"
    how, source = (record.found, record.source) if record is not None and walked else (finding.found, finding.source)
    report = CollectionReport(
        paths=tuple(finding.paths),
        kind=type(finding.module).__name__ if record is None else record.kind,
        status=finding.status,
        why=finding.why,
        found=how,
        file="" if source is None else source.file,
        line=0 if source is None else source.line,
        reasons=(
            *([] if finding.why is None else [finding.why]),
            *([never_called(finding.path)] if how == "never called" else []),
        ),
    )
    was_converted = finding.status == CONVERTIBLE or (record is not None and record.kind not in _BUILT)
    existed = was_converted and not learned
    try:
        return describe(report, collection, existed, planned)
    except ConversionError as error:
        if planned is None:
            raise
        described = describe(report, collection, existed)
        return replace(described, reasons=(*described.reasons, error.diagnostic))


_BUILT = {kind.__name__ for kind in CONVERTED_CLASSES.values()}  # without a conversion


def _ranks(asked: Request, world_size: int | None) -> tuple[int, int]:
    """For how many ranks the report is, and for which of them: this one if there are as many, otherwise rank 0."""
    ranks = None if world_size is None else whole_number(world_size, "world_size", most=MOST_RANKS)
    here = None if asked.env is None else (asked.env.world_size, asked.env.rank)
    if here is None and dist.is_available() and dist.is_initialized():
        here = dist.get_world_size(), dist.get_rank()  # as for convert; making a ShardingEnv may communicate
    if ranks is None and asked.topology is not None:
        ranks = asked.topology.world_size
    if ranks is None and here is not None:
        ranks = here[0]
    count = ranks if asked.plan is None else world_size_of(asked.plan, ranks)
    assert count is not None  # env is given, or the topology
    return count, here[1] if here is not None and here[0] == count else 0


def _planned(
    model: nn.Module, decision: Decision, asked: Request, world_size: int, rank: int
) -> tuple[AsPlanned | None, list[Diagnostic]]:
    """The plan that is given, or that ``convert`` would make; and how it was chosen, or what is wrong with it."""
    plan = asked.plan
    if plan is None and decision.refusals:
        return None, []
    try:
        if plan is None:
            converted = model if decision.converted is None else decision.converted
            topology = asked.topology or plain_topology(world_size, device_of_tables(converted))
            plan = make_plan(converted, topology, with_torchrec=False)
        statuses = (CONVERTED, CONVERTIBLE) if asked.keeps else (CONVERTED, CONVERTIBLE, REFUSED)
        known = [finding for finding in decision.discovery.findings if finding.status in statuses]
        problems = []
        refuse_unknown_collections(plan, {path for finding in known for path in finding.paths})
    except ConversionError as error:
        problems = [error.diagnostic]
    if plan is None:
        return None, problems
    topology = asked.topology or getattr(plan, "topology", None)
    return AsPlanned(plan, rank, world_size, topology), price_of(plan) + problems


class _Records:
    """The conversion records of a model, outermost first: parts of it may have been converted by themselves."""

    def __init__(self, model: nn.Module) -> None:
        inside = [(path, conversion_of(one)) for path, one in model.named_modules() if unwrap(one) is one]
        self.conversions = [(path, record) for path, record in inside if record.found or record.notes]

    def of_collection(self, finding: Finding) -> Found | None:
        """What was recorded when ``finding`` was converted or kept."""
        names = map(without_wrappers, finding.paths)  # it may have been wrapped, or unwrapped, since then
        return next((self._by_path[name] for name in names if name in self._by_path), None)

    def kept(self, finding: Finding) -> Diagnostic | None:
        """Why it was kept although it can be converted, if it was."""
        record = self.of_collection(finding)
        return record.why if record is not None and record.status == REFUSED else None

    @cached_property
    def _by_path(self) -> dict[str, Found]:
        """The collections by path in the model without wrappers, the outermost record first."""
        by_path: dict[str, Found] = {}
        for prefix, record in self.conversions:
            for entry in record.found:
                for path in (f"{prefix}.{path}" if prefix and path else prefix or path for path in entry.paths):
                    by_path.setdefault(without_wrappers(path), entry)
        return by_path

    def traced(self) -> bool:
        """Whether a conversion has traced where collections are called."""
        records = [record for _, record in self.conversions]
        return any(record.rollbacks or any(one.found != "walked" for one in record.found) for record in records)

    def verification(self, model: nn.Module) -> Verification:
        """The verification of the outermost conversion; if there is none, it says why."""
        record = next((record for _, record in self.conversions if record.found), None)
        if record is None:
            built = bool(converted_collections(model))
            return Verification(None, "not run: built directly" if built else "not run: not converted yet")
        if record.verification is not None:
            return Verification.of(record)
        was_given = self.traced() or isinstance(unwrap(model), WholeGraph)
        return Verification(None, f"not run: {'verify=False' if was_given else 'converted without a sample'}")
