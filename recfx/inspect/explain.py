"""``recfx.explain``: reports what was done to a model, or what ``convert`` would do. Changes nothing."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import nn

from recfx.diagnostics import Diagnostic, Severity
from recfx.discovery.classify import CONVERTIBLE, REFUSED, Finding
from recfx.discovery.discover import Discovery, check_module, discover
from recfx.errors import ConversionError
from recfx.inspect.collection_report import CollectionReport
from recfx.inspect.describe import describe_converted, describe_other, with_reasons
from recfx.inspect.describe_sharded import describe_sharded
from recfx.inspect.planned import PlannedSharding, already_sharded
from recfx.inspect.records import Records
from recfx.inspect.report import Report
from recfx.inspect.report_data import REPORT_VERSION, Verification
from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.modules.whole_graph import WholeGraph
from recfx.record.conversion import Found
from recfx.record.wrappers import unwrap
from recfx.replacement.dry_run import dry_run, unchanged
from recfx.sharding.collection import ShardedHashEmbeddingBagCollection
from recfx.tracing.sample import Sample
from recfx.version import __version__


def explain(
    model: nn.Module, sample: Any = None, plan: Any = None, *, tables: Literal["groups", "all"] = "groups"
) -> Report:
    """Say what was done to ``model``, or, before conversion, what ``convert`` would do to it by default.

    What cannot be converted raises nothing: the report lists it, with the reason and what to do. The model, its
    optimizers and the random state stay as they are, and no table is allocated.

    Args:
        model: any module, converted or not, also inside DDP and torch.compile wrappers.
        sample: one call of it, to confirm where its collections are called. Not needed if the model was converted with
            a sample.
        plan: TorchRec's sharding plan for a model that is not sharded: the report says what it would do to the tables,
            and what is wrong with it. A sharded model is explained as this rank sees it; nothing is communicated.
        tables: how the text shows many tables: ``"groups"`` has one line per group of like ones and one message per
            reason, ``"all"`` has everything. The report's data, JSON and HTML are the same.

    Raises:
        ConversionError: ``invalid_argument``.
    """
    check_module(model)
    if tables not in ("groups", "all"):
        raise ConversionError(
            f"tables={tables!r} is neither 'groups' nor 'all'.",
            reason="invalid_argument",
            what_to_do="pass tables='all' for a line per table.",
        )
    planned = None if plan is None else PlannedSharding(plan)
    model = _holder(model)
    records = Records.of(model)
    traceable = not records.traced() and not isinstance(unwrap(model), WholeGraph)
    call = Sample.of(sample) if sample is not None and traceable else None
    with unchanged(model):
        discovery = discover(model, call)
        for finding in discovery.of(CONVERTIBLE):
            found = records.of_collection(finding)
            if found is not None and found.why is not None and found.status == REFUSED:
                # It was refused with the hashing requested then; the default hashing might not be refused.
                finding.refuse(found.why)
        replacements = dry_run(discovery)
        collections = [
            _collection(
                finding, replacements.get(id(finding.module), finding.module), records.of_collection(finding), planned
            )
            for finding in discovery.findings
        ]
    rollbacks = list(discovery.rollbacks) + [found for _, record in records.conversions for found in record.rollbacks]
    notes = [note for _, record in records.conversions for note in record.notes]
    verification = records.verification(model)
    reasons = [reason for collection in collections for reason in collection.reasons]
    reasons += _model_reasons(discovery, rollbacks, verification) + notes
    if planned is not None:
        reasons += planned.price()
        reasons += planned.unknown({path for finding in discovery.findings for path in finding.paths})
    reasons.sort(key=lambda reason: reason.severity.rank)
    return Report(
        version=REPORT_VERSION,
        recfx_version=__version__,
        torch_version=torch.__version__,
        torchrec_version=_torchrec_version(),
        ok=all(reason.severity != Severity.ERROR for reason in reasons),
        collections=tuple(collections),
        reasons=tuple(reasons),
        rollbacks=tuple(rollbacks),
        verification=verification,
        notes=tuple(notes),
        tables=tables,
    )


@functools.cache
def _torchrec_version() -> str:
    return version("torchrec")  # reads files


def _holder(model: nn.Module) -> nn.Module:
    """The module to search for collections: the whole graph of a model that is one collection has inlined it."""
    inside = unwrap(model)
    if isinstance(inside, WholeGraph) and isinstance(inside.python_model, HashEmbeddingBagCollection):
        return inside.python_model
    return model


def _collection(
    finding: Finding, collection: nn.Module, record: Found | None, planned: PlannedSharding | None
) -> CollectionReport:
    """The report of one collection.

    Args:
        finding: what discovery finds now.
        collection: the collection itself, or what it would become.
        record: what discovery found when it was converted, if it was.
        planned: the plan that the user asks about.
    """
    known = record is not None and finding.found == "walked"
    how, source = (record.found, record.source) if record is not None and known else (finding.found, finding.source)
    found = CollectionReport(
        paths=tuple(finding.paths),
        kind=type(finding.module).__name__ if record is None else record.kind,
        status=finding.status,
        why=finding.why,
        found=how,
        file="" if source is None else source.file,
        line=0 if source is None else source.line,
        reasons=_collection_reasons(finding, how),
    )
    existed = finding.status == CONVERTIBLE or (
        record is not None and record.kind != HashEmbeddingBagCollection.__name__
    )
    if isinstance(collection, HashEmbeddingBagCollection):
        described = describe_converted(found, collection, existed)
        return with_reasons(described) if planned is None else planned.describe(described, collection)
    if isinstance(collection, ShardedHashEmbeddingBagCollection):
        described = describe_sharded(found, collection, existed)
        return described if planned is None else already_sharded(described)
    return describe_other(found, finding.module)


def _collection_reasons(finding: Finding, found: str) -> tuple[Diagnostic, ...]:
    reasons = []
    if finding.why is not None:
        reasons.append(finding.why)
    if found == "never called":
        message = "calling the model with the sample never reaches this collection, in train or eval mode."
        advice = "check the sample, or call the collection; what is converted does not depend on it."
        reasons.append(Diagnostic("never_called", finding.path, message, advice, Severity.WARNING))
    return tuple(reasons)


def _model_reasons(discovery: Discovery, rollbacks: list[Diagnostic], verification: Verification) -> list[Diagnostic]:
    reasons = []
    if not discovery.findings:
        message = "there is no EmbeddingBagCollection in the model."
        advice = (
            "pass the model that holds the torchrec.EmbeddingBagCollection, before it is scripted, traced or exported."
        )
        reasons.append(Diagnostic("no_collection", "", message, advice, Severity.ERROR))
    for rollback in rollbacks:
        message = f"could not be traced: {rollback.message}"
        advice = "nothing: its code stays Python, and the collections inside it are converted anyway."
        reasons.append(replace(rollback, message=message, what_to_do=advice))
    if verification.ok is False:
        message = "the converted model does not agree with the original."
        advice = "please report this, with the model."
        reasons.append(Diagnostic("verification_failed", "", message, advice, Severity.ERROR))
    return reasons
