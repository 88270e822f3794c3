"""Decides what becomes of each collection of a model, and what is refused: for ``convert``, and for ``explain``."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import CellType, FunctionType
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.copy_modules import attributes, copy_modules, refuse_fully_sharded
from recfx.collections.kinds import kind_of
from recfx.collections.replaced import REPLACED, CatchingCall
from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.wrappers import usable_device
from recfx.conversion.request import DEFAULT_HASHING, Request, declared_ranges
from recfx.errors import GROW, ConversionError, Diagnostic, Severity, did_you_mean
from recfx.models.classify import CONVERTED, CONVERTIBLE, KEPT, REFUSED, SHARDED_BY_TORCHREC, Finding
from recfx.models.conversion_record import Conversion, attach_conversion, conversion_of, recorded
from recfx.models.discover import Discovery, discover
from recfx.models.managed_collisions import TakenOver, take_over
from recfx.models.replace_collections import (
    check_table_names,
    config_for,
    dedup_of,
    mark_shared_weights,
    notes_on_tied,
    replace_collections,
)
from recfx.models.resize_tables import TableResizing
from recfx.models.sample import Sample
from recfx.models.verify import verify
from recfx.models.verify_report import DIFFERENT, REFUSED_SAMPLE, SKIPPED, VerifyReport
from recfx.runtime.base import FORWARD_HOOKS


@dataclass
class Decision:
    """What becomes of a model. Record and model are None if all is converted already, or something is refused."""

    discovery: Discovery
    replacements: dict[int, nn.Module] = field(default_factory=dict)  # converted collections, by ``id`` of the original
    conversion: Conversion | None = None
    converted: nn.Module | None = None  # the model with them, neither sharded nor moved yet
    refusals: list[Diagnostic] = field(default_factory=list)
    taken_over: TakenOver | None = None

    def replaced_in(self, model: nn.Module) -> dict[str, nn.Module]:
        """The collections of ``model`` whose places others take, by path."""
        ids = {*self.replacements, *({} if self.taken_over is None else self.taken_over.places.values())}
        return {path: module for path, module in model.named_modules() if id(module) in ids}


def decide(
    model: nn.Module,
    asked: Request,
    resizing: TableResizing,
    *,
    raises: bool = True,
    kept_before: Callable[[Finding], Diagnostic | None] | None = None,
) -> Decision:
    """What becomes of ``model``, which does not change, except for tables that ``resizing`` gives more rows. With
    ``raises``, the first refusal is raised, otherwise all are listed. ``kept_before`` says why an earlier conversion
    kept a collection that could be converted by default.
    """
    taken_over = take_over(model, shards=asked.shards) if asked.managed_collisions == "convert" else TakenOver(model)
    discovery = discover(taken_over.model, asked.call)
    taken_over.mark(discovery)
    if kept_before is not None:
        for finding in discovery.of(CONVERTIBLE):
            if (why := kept_before(finding)) is not None:
                finding.refuse(why)
    decision = Decision(discovery, taken_over=taken_over)

    @contextlib.contextmanager
    def refusals() -> Iterator[None]:
        try:
            yield
        except ConversionError as error:
            if raises or error.reason == "invalid_argument":
                raise
            decision.refusals.append(error.diagnostic)

    if asked.device is not None:
        with refusals():
            if usable_device(asked.device).type != "meta":
                _refuse_rest_on_meta(taken_over.model, discovery)
    with refusals():
        _declare_id_ranges(discovery, asked)
    with refusals():
        _refuse_unsupported(discovery, asked.on_unsupported)
    if asked.shards:
        with refusals():
            _refuse_sharded(discovery)
    if discovery.of(CONVERTED) and not discovery.of(CONVERTIBLE):
        with refusals():
            _refuse_other_request(discovery, asked)
            if asked.shards:
                _refuse_to_copy(model, asked)
        return decision
    with refusals():
        decision.replacements = replace_collections(
            discovery.of(CONVERTIBLE), asked.hashing, asked.backend, resizing, keep_refused=asked.keeps or not raises,
            passes=asked.passes, dedup=asked.dedup,
        )  # fmt: skip
        if not asked.keeps and not isinstance(asked.hashing, Mapping):
            _refuse_raw_ids_of_kept(discovery, decision.replacements)
        if not decision.refusals:
            _refuse_unsupported(discovery, asked.on_unsupported)  # what their tables have shown only now
    if decision.refusals:
        return decision
    with refusals():
        _refuse_to_copy(model, asked)
        decision.converted, _ = copy_modules(taken_over.model, decision.replacements)
        mark_shared_weights(decision.converted)
        conversion = decision.conversion = recorded(discovery, asked.on_unsupported, before=conversion_of(model))
        conversion.notes += taken_over.notes(discovery, decision.replacements)
        conversion.notes += notes_on_tied(decision.converted)
        if not asked.inplace:
            conversion.notes += compile_dropped(model) + refers_to_original(model) + resizing.notes()
        attach_conversion(decision.converted, conversion)
        if asked.verifies:
            conversion.notes += check_conversion(model, decision.converted, asked, conversion, discovery)
    return decision


def _refuse_to_copy(model: nn.Module, asked: Request) -> None:
    if not asked.inplace:
        refuse_fully_sharded(model, "call recfx.convert first and fully_shard afterwards; or pass inplace=True.")


def _refuse_rest_on_meta(model: nn.Module, discovery: Discovery) -> None:
    """Refuse to move what is on meta from there, except for tables: ``convert`` can initialise nothing else."""
    tables = {
        id(part)
        for finding in discovery.of(CONVERTIBLE) + discovery.of(CONVERTED)
        if not getattr(finding.module, "is_sharded", False)
        for part in finding.module.modules()
    }
    for path, part in model.named_modules():
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        on_meta = [name for name, tensor in tensors if tensor.is_meta]
        if on_meta and id(part) not in tables:
            raise ConversionError(
                f"its {on_meta[0]} is on the meta device and has no values that device= could move.",
                reason="model_on_meta",
                module_path=path,
                what_to_do="allocate and initialise it first, with its to_empty(device=...) and reset_parameters(); or "
                "leave out device=. Tables are allocated and initialised by convert.",
            )


def _declare_id_ranges(discovery: Discovery, asked: Request) -> None:
    """Add the declared ``id_ranges`` to the findings; graphs that are there already were made without them."""
    if asked.id_ranges is None:
        return
    ranges = declared_ranges(asked.id_ranges)
    read = set()
    for finding in discovery.of(CONVERTIBLE):
        features = _features_of(finding)
        read |= features
        for feature in features & ranges.keys():
            finding.id_ranges[feature] = ranges[feature]
    converted = {name: finding for finding in discovery.of(CONVERTED) for name in _features_of(finding) - read}
    for feature in sorted(ranges.keys() & converted.keys()):
        raise _already_converted(converted[feature], f"an id range of feature {feature!r}")
    if unknown := sorted(ranges.keys() - read):
        raise ConversionError(
            f"id_ranges names feature {unknown[0]!r}, which no collection that can be converted reads"
            f"{did_you_mean(unknown[0], sorted(read))}.",
            reason="unknown_feature",
            what_to_do=f"name features of their tables: {', '.join(sorted(read)[:8])}{', ...' * (len(read) > 8)}.",
        )


def _features_of(finding: Finding) -> set[str]:
    configs = kind_of(finding.module).configs_of(finding.module)
    return {feature for config in configs for feature in config.feature_names}


def _refuse_unsupported(discovery: Discovery, on_unsupported: str) -> None:
    """Refuse a collection that cannot be converted, unless the user wants it kept, and a model without collections."""
    refused = discovery.of(REFUSED)
    if refused and on_unsupported == "error":
        first = refused[0]
        others = f" ({len(refused) - 1} more cannot be converted either)" if len(refused) > 1 else ""
        assert first.why is not None
        raise ConversionError.of(replace(first.why, message=first.why.message + others))
    if not discovery.findings:
        raise ConversionError(
            "there is no EmbeddingBagCollection or EmbeddingCollection in the model.",
            reason="no_collection",
            what_to_do="pass the model that holds the collections of TorchRec, before it is scripted, traced or "
            "exported.",
        )


def _refuse_raw_ids_of_kept(discovery: Discovery, replacements: Mapping[int, nn.Module]) -> None:
    """Refuse raw ids for the whole model if some collections stay as they are: these would take the ids for rows."""
    collections = [module for module in replacements.values() if isinstance(module, ConvertedCollection)]
    raw = [table for collection in collections for table in collection.tables_with_index()]
    for finding in discovery.of(KEPT):
        if raw and finding.reason == SHARDED_BY_TORCHREC:
            raise ConversionError(
                f"hashing= makes the whole model take raw ids, which {type(finding.module).__name__}, which is not "
                "converted, would take for rows.",
                reason="raw_ids_of_kept_tables",
                module_path=finding.path,
                what_to_do=f"name the tables, hashing={{{raw[0]!r}: HashConfig(...)}}; or, if the kept tables get "
                "row numbers anyway, pass on_unsupported='keep'.",
            )


def _refuse_other_request(discovery: Discovery, asked: Request) -> None:
    """Converting twice is a no-op; asking for something different the second time is an error."""
    check_table_names(discovery.of(CONVERTED), asked.hashing, asked.dedup)
    for finding in discovery.of(CONVERTED):
        converted: Any = finding.module  # sharded ones remember the request too
        other = [
            table
            for table, requested in converted.requested.items()
            if asked.hashing is not DEFAULT_HASHING and config_for(table, asked.hashing) != requested
        ]
        other_dedup = any(dedup_of(table.name, asked.dedup) != table.dedup for table in converted.tables)
        for is_asked, what in (
            (other, f"a different hashing of table {other[0]!r}" if other else ""),
            (asked.backend not in ("auto", converted.backend), f"backend {asked.backend!r}"),
            (asked.passes is not None and asked.passes != converted.passes, "other passes"),
            (asked.dedup != "auto" and other_dedup, "another dedup"),
        ):
            if is_asked:
                raise _already_converted(finding, what)


def _already_converted(finding: Finding, what: str) -> ConversionError:
    converted: Any = finding.module
    plain = "call recfx.unconvert, and convert what it returns as you want it"
    return ConversionError(
        f"the collection is already converted, and this call asks for {what}.",
        reason="already_converted",
        module_path=finding.path,
        what_to_do=f"if its indexes hold no ids yet, {plain}. If they do: {GROW[0].lower()}{GROW[1:]}"
        if converted.tables_with_index()
        else f"{plain}.",
    )


def _refuse_sharded(discovery: Discovery) -> None:
    """Refuse to shard again: a rank has only its own shards, from which no other plan can be made."""
    for finding in discovery.of(CONVERTED):
        if isinstance(finding.module, ConvertedCollection) and finding.module.is_sharded:
            raise ConversionError(
                "the collection is sharded already.",
                reason="already_sharded",
                module_path=finding.path,
                what_to_do="leave out plan= and env=; for a different plan, build the model anew, convert it with that "
                "plan, and load the state of this one.",
            )


# Verification holds up to three copies of the parameters plus gradients: larger models are verified only on request.
MOST_BYTES_VERIFIED = 2 * 2**30


def compile_dropped(model: nn.Module) -> list[Diagnostic]:
    """Modules on which ``Module.compile()`` was called: the compiled code is bound to the original."""
    message = "Module.compile() was called on the original; the converted module runs uncompiled."
    what_to_do = "call .compile() on the converted model."
    calls = {path: module._compiled_call_impl for path, module in model.named_modules()}
    compiled = [path for path, call in calls.items() if not isinstance(call, CatchingCall | None)]
    return [Diagnostic("compile_dropped", path, message, what_to_do) for path in compiled]


def refers_to_original(model: nn.Module) -> list[Diagnostic]:
    """Functions and weak references in attributes and hooks that hold modules of the original: a copy shares them."""
    modules = {id(module) for module in model.modules()}
    notes: dict[str, Diagnostic] = {}
    for path, module in model.named_modules():
        hooks = [hook for name in FORWARD_HOOKS for hook in module.__dict__.get(name, {}).values()]
        values = tree_leaves([hooks, *(value for _, value in attributes(module))])
        if any(id(item) in modules for value in values for item in _shared_by_copies(value)):
            message = "a closure or weak reference, in an attribute or a hook, goes on using the original modules."
            what_to_do = "pass inplace=True, or make it again for the converted model."
            notes[path] = Diagnostic("refers_to_original", path, message, what_to_do, Severity.WARNING)
    return list(notes.values())


def _shared_by_copies(value: Any) -> list[Any]:
    """What a function, a cached one, or a weak reference refers to."""
    value = getattr(value, "__wrapped__", value) if callable(value) else value
    if isinstance(value, weakref.ref):
        return [getattr(value(), "__self__", value())]
    cells = value.__closure__ or () if isinstance(value, FunctionType) else ()
    return [cell.cell_contents for cell in cells if cell != CellType()]


def check_conversion(
    model: nn.Module, converted: nn.Module, asked: Request, conversion: Conversion, discovery: Discovery
) -> list[Diagnostic]:
    """Compare the converted model with the original; add the report to ``conversion``, and return its notes."""
    skipped = _why_not_verified(model, asked.call, bool(asked.verify))
    if skipped is None:
        assert asked.call is not None
        report = conversion.verification = verify(model, converted, asked.call)
        # What was run overrules the trace, which enters neither hooks nor a forward that is put on a module.
        for finding in discovery.findings:
            if finding.found == "never called" and report.called.intersection(finding.paths):
                finding.found = "traced"
        conversion.found = recorded(discovery, asked.on_unsupported, before=conversion_of(model)).found
        skipped = _judge(report)
    return [] if skipped is None else [skipped]


def _why_not_verified(model: nn.Module, call: Sample | None, whatever_its_size: bool) -> Diagnostic | None:
    """Models that are not compared: they are on meta, or sharded, or too large to copy unless the user asks for it."""
    parameters = [parameter for parameter in model.parameters() if not isinstance(parameter, UninitializedParameter)]
    size, path = sum(parameter.numel() * parameter.element_size() for parameter in parameters), ""
    if (call or Sample()).on_meta(model):
        message = "the model is on the meta device, where nothing can be computed."
        what_to_do = "call recfx.verify once the model is on a device."
    elif sharded := list(sharded_collections(model)):
        message, path = "the model holds sharded collections, of which each rank has only a part.", sharded[0]
        what_to_do = "convert all collections before any is sharded."
    elif size > MOST_BYTES_VERIFIED and not whatever_its_size:
        message = f"the parameters take {size / 2**30:.1f} GiB, and verification works on copies of them."
        what_to_do = "pass verify=True to convert, or verify a model with smaller tables."
    else:
        return None
    return Diagnostic("verification_skipped", path, message, what_to_do)


def _judge(report: VerifyReport) -> Diagnostic | None:
    """Refuse a conversion that differs from the original; if nothing could be compared, the note says why."""
    for check in report.of(DIFFERENT):
        if check.where == REFUSED_SAMPLE:
            raise ConversionError(
                f"the converted model cannot be called with the sample: {check.message}",
                reason="sample_failed",
                what_to_do=check.what_to_do or "pass another sample, or convert without one.",
            )
        if check.what == "calls":
            raise ConversionError(check.message, reason=REPLACED, module_path=check.where, what_to_do=check.what_to_do)
    if report.of(DIFFERENT):
        raise ConversionError(
            f"the converted model does not agree with the original.\n{report}",
            reason="verification_failed",
            what_to_do="please report this, with the model; verify=False converts without the check.",
        )
    if report.ok or not report.of(SKIPPED):
        return None
    first = report.of(SKIPPED)[0]
    if first.where == "original":
        raise ConversionError(
            f"the model cannot be called with the sample: {first.message}",
            reason="sample_failed",
            what_to_do=first.what_to_do or "pass one call of the model that works, or verify=False.",
        )
    return Diagnostic("verification_skipped", "", first.message, "compare outputs yourself.")
