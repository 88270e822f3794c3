"""``recfx.convert``: the whole pipeline, top to bottom, one named step a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recfx.conversion.load_guard import guard_loading
from recfx.conversion.notes import compile_dropped, not_verified
from recfx.conversion.whole_graph import make_whole_graph
from recfx.diagnostics import Diagnostic
from recfx.discovery.bypass import bypassed
from recfx.discovery.classify import CONVERTED, CONVERTIBLE, EMBEDDING_COLLECTION, KEPT, REFUSED, Finding
from recfx.discovery.discover import Discovery, check_module, discover
from recfx.discovery.recorded import recorded
from recfx.errors import ConversionError
from recfx.hashing import HashConfig
from recfx.modules.collection import unsharded_collections
from recfx.modules.converted_collection import ConvertedCollection
from recfx.modules.copy_modules import copy_modules, replace_in_place
from recfx.modules.devices import usable_device
from recfx.modules.whole_graph import WholeGraph
from recfx.optim.fused_view import attach_fused_optimizer
from recfx.planner.shard_model import shard_collections
from recfx.record.conversion import Conversion, attach_conversion, conversion_of
from recfx.record.verify_report import DIFFERENT, EQUAL, REFUSED_SAMPLE, SKIPPED, VerifyReport
from recfx.record.wrappers import unwrap
from recfx.replacement.replace_collections import Hashing, carry_references, config_for, replace_collections
from recfx.replacement.resize_tables import TableResizing
from recfx.sharding.collection import sharded_collections
from recfx.sharding.data_parallel import leave_to_collections
from recfx.tracing.sample import Sample
from recfx.verification.verify import verify as verify_conversion

_DEFAULT_HASHING = HashConfig()


def convert(
    model: nn.Module,
    sample: Any = None,
    *,
    hashing: Hashing = _DEFAULT_HASHING,
    plan: ShardingPlan | None = None,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    whole_graph: bool = False,
    verify: bool | None = None,
    inplace: bool = False,
    on_unsupported: str = "error",
) -> nn.Module:
    """Rewrite every ``EmbeddingBagCollection`` of ``model`` to a ``HashEmbeddingBagCollection`` of explicit nodes.

    Outputs, weights, parameter names and parameter objects stay. Without ``hashing=`` ids are dense and checked; with
    ``HashConfig(dense_rows=0)`` they are raw 64-bit ids.

    Args:
        model: any module.
        sample: one call of it, as a tuple of positional arguments or a :class:`Sample`. Used to confirm where the
            collections are called, and to verify the result.
        hashing: one config for every table, None for static tables, or a dict by table name (others take the default).
        plan: TorchRec's sharding plan, by fully qualified name of the collections. They come back sharded, each rank
            with its own part of the weights that ``model`` has; every rank calls ``convert`` then. The result has
            ``fused_optimizer``, as a ``DistributedModelParallel`` does.
        env: the ranks to shard over; with it and without ``plan``, TorchRec's planner makes one. Default: all ranks.
        device: move the result there; tables on meta are allocated and initialised.
        backend: kernel target of the lookups; ``"auto"`` takes the first that can serve each.
        whole_graph: return the whole model as a graph (a train and an eval one over shared modules); needs a sample.
        verify: compare with the original on copies, in outputs, gradients and one step. None: if there is a sample,
            and the parameters take no more than 2 GiB.
        inplace: False makes new module objects around the same parameters, and the original still runs: helper objects
            and functions that lead to its modules (attributes, closures, weak references) are copied, too. True patches
            the parents of the collections, and what else leads to them (a model that is a collection itself is
            replaced, use the return value).
        on_unsupported: ``"error"``, or ``"keep"`` to leave what cannot be converted, listed in the report.

    Returns:
        the converted model. ``recfx.explain`` says what was done to it.

    Raises:
        ConversionError: with a reason code; the model is as it was.
    """
    call = None if sample is None else Sample.of(sample)
    _check_arguments(model, call, plan, env, whole_graph, verify, on_unsupported)
    sharded = plan is not None or env is not None
    verified = call is not None if verify is None else verify
    discovery = discover(model, call, calls_are_counted=verified and on_unsupported == "error")
    _refuse(discovery, on_unsupported)
    if sharded:
        _refuse_sharded(discovery)
    if discovery.of(CONVERTED) and not discovery.of(CONVERTIBLE):
        _refuse_other_request(discovery, hashing, backend)
        if sharded:
            model = _shard(model, plan, env, device, inplace)
        _place(model, device)
        guard_loading(model)
        return _as_whole_graph(model, call) if whole_graph else model
    with TableResizing(under_ddp=_holds_ddp(model)) as resizing:
        replacements = replace_collections(
            discovery.of(CONVERTIBLE), hashing, backend, resizing, on_unsupported == "keep"
        )
        if on_unsupported == "error" and not isinstance(hashing, Mapping):
            _refuse_raw_ids_of_kept(discovery, replacements)
        converted, _ = copy_modules(model, replacements)
        conversion = recorded(discovery, on_unsupported, before=conversion_of(model))
        conversion.notes += compile_dropped(model, inplace)
        attach_conversion(converted, conversion)
        if verified:
            conversion.notes += not_verified(model, call, asked=bool(verify)) or _verify(
                model, converted, call, conversion, discovery
            )
            conversion.notes += _cleared_of_bypass(discovery, conversion)
        if sharded:
            before = converted
            converted = _shard(converted, plan, env, device, inplace=False)
            replacements = _sharded_replacements(replacements, before, converted)
        _place(converted, device)
        guard_loading(converted)
        if whole_graph:
            converted = _as_whole_graph(converted, call)
        elif inplace:
            converted = _patch(model, converted, replacements, discovery.findings)
            guard_loading(converted)
        resizing.keep()
    return converted


def _check_arguments(
    model: Any, call: Sample | None, plan: Any, env: Any, whole_graph: bool, verify: bool | None, on_unsupported: str
) -> None:
    check_module(model)
    if on_unsupported not in ("error", "keep"):
        raise ConversionError(
            f"on_unsupported is {on_unsupported!r}.", reason="invalid_argument", what_to_do="use 'error' or 'keep'."
        )
    if plan is not None and not isinstance(plan, ShardingPlan):
        raise ConversionError(
            f"plan is a {type(plan).__name__}.",
            reason="invalid_argument",
            what_to_do="pass a torchrec.distributed.types.ShardingPlan, from recfx.plan or TorchRec's planner.",
        )
    if env is not None and not isinstance(env, ShardingEnv):
        raise ConversionError(
            f"env is a {type(env).__name__}.",
            reason="invalid_argument",
            what_to_do="pass torchrec.distributed.types.ShardingEnv.from_process_group(group).",
        )
    if call is None and (whole_graph or verify):
        raise ConversionError(
            f"{'whole_graph' if whole_graph else 'verify'}=True needs a sample.",
            reason="sample_required",
            what_to_do="pass sample=(inputs, ...), one call of the model.",
        )


def _refuse(discovery: Discovery, on_unsupported: str) -> None:
    refused = discovery.of(REFUSED)
    if refused and on_unsupported == "error":
        first = refused[0]
        others = f" ({len(refused) - 1} more cannot be converted either)" if len(refused) > 1 else ""
        assert first.why is not None
        raise ConversionError.of(replace(first.why, message=first.why.message + others))
    if not discovery.findings:
        raise ConversionError(
            "there is no EmbeddingBagCollection in the model.",
            reason="no_collection",
            what_to_do="pass the model that holds the torchrec.EmbeddingBagCollection, before it is scripted, "
            "traced or exported.",
        )


def _refuse_raw_ids_of_kept(discovery: Discovery, replacements: Mapping[int, nn.Module]) -> None:
    """Raw ids for the whole model would also reach the collections that stay as they are, which take them for rows."""
    collections = [each for each in replacements.values() if isinstance(each, ConvertedCollection)]
    raw = [table for collection in collections for table in collection.tables_with_index()]
    for finding in discovery.of(KEPT):
        if raw and finding.reason == EMBEDDING_COLLECTION:
            configs: list[Any] = getattr(finding.module, "embedding_configs", list)()
            names = ", ".join(repr(config.name) for config in configs) or "its tables"
            raise ConversionError(
                f"hashing= gives the whole model raw ids, but {type(finding.module).__name__} is not converted: its "
                f"tables ({names}) would take them for rows.",
                reason="raw_ids_of_kept_tables",
                module_path=finding.path,
                what_to_do=f"name the tables, hashing={{{raw[0]!r}: HashConfig(...)}}; or, where the kept tables get "
                "row numbers all the same, pass on_unsupported='keep'.",
            )


def _holds_ddp(model: nn.Module) -> bool:
    return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())


def _refuse_other_request(discovery: Discovery, hashing: Hashing, backend: str) -> None:
    """Converting twice is a no-op; asking for something else the second time is an error."""
    for finding in discovery.of(CONVERTED):
        converted: Any = finding.module  # sharded ones remember the request too
        other = [
            table
            for table, requested in converted.requested.items()
            if hashing is not _DEFAULT_HASHING and config_for(table, hashing) != requested
        ]
        if other or backend not in ("auto", converted.backend):
            what = f"another hashing of table {other[0]!r}" if other else f"backend {backend!r}"
            raise ConversionError(
                f"the collection is converted already, and {what} is asked for.",
                reason="already_converted",
                module_path=finding.path,
                what_to_do="call recfx.unconvert first, then convert as you want it.",
            )


def _refuse_sharded(discovery: Discovery) -> None:
    """A rank has its shards alone: another plan cannot be made of them."""
    for finding in discovery.of(CONVERTED):
        if isinstance(finding.module, ConvertedCollection) and finding.module.is_sharded:
            raise ConversionError(
                "the collection is sharded already.",
                reason="already_sharded",
                module_path=finding.path,
                what_to_do="leave plan= and env= out; for another plan build the model anew, convert it with that "
                "plan, and load the state of this one.",
            )


def _place(converted: nn.Module, device: torch.device | str | None) -> None:
    if device is None:
        return
    device = usable_device(device)
    for collection in unsharded_collections(converted).values():
        if any(weight.is_meta for weight in collection.parameters()):
            collection.to_empty(device=device)
            collection.reset_parameters()
    converted.to(device)


def _shard(
    converted: nn.Module,
    plan: ShardingPlan | None,
    env: ShardingEnv | None,
    device: torch.device | str | None,
    inplace: bool,
) -> nn.Module:
    """The collections on all ranks; the rest of the model as it is."""
    conversion = conversion_of(converted)  # hangs on a root that may be a collection itself
    sharded = shard_collections(converted, plan, env, device)
    if inplace and id(converted) not in sharded:
        replace_in_place(converted, sharded)
        model = converted
    else:
        model, _ = copy_modules(converted, sharded)
    attach_conversion(model, conversion)
    leave_to_collections(model)
    attach_fused_optimizer(model)
    return model


def _sharded_replacements(
    replacements: Mapping[int, nn.Module], before: nn.Module, after: nn.Module
) -> dict[int, nn.Module]:
    """The sharded collection that takes the place of each original, by ``id`` of that."""
    path_of = {id(collection): path for path, collection in unsharded_collections(before).items()}
    return {original: after.get_submodule(path_of[id(collection)]) for original, collection in replacements.items()}


def _verify(
    model: nn.Module, converted: nn.Module, call: Sample | None, conversion: Conversion, discovery: Discovery
) -> list[Diagnostic]:
    """Compare; the notes say what stood in the way where nothing could be compared."""
    assert call is not None
    report = conversion.verification = verify_conversion(model, converted, call)
    _refuse_suspected(discovery, report)
    refused = [check.message for check in report.of(DIFFERENT) if check.where == REFUSED_SAMPLE]
    if refused:
        raise ConversionError(
            f"the converted model cannot be called with the sample: {refused[0]}",
            reason="sample_failed",
            what_to_do="follow the advice above, or convert without a sample.",
        )
    for check in report.of(DIFFERENT):
        if check.what == "calls":
            raise ConversionError.of(bypassed(check.where, check.message))
    if report.of(DIFFERENT):
        raise ConversionError(
            f"the converted model does not agree with the original.\n{report}",
            reason="verification_failed",
            what_to_do="please report it with the model; verify=False converts without the check.",
        )
    skipped = report.of(SKIPPED)
    if report.ok or not skipped:
        return []
    first = skipped[0]
    if first.where == "original":
        raise ConversionError(
            f"the model cannot be called with the sample: {first.message}",
            reason="sample_failed",
            what_to_do="pass one call of the model that works, or verify=False.",
        )
    return [Diagnostic("verification_skipped", "", first.message, "compare outputs yourself.")]


def _refuse_suspected(discovery: Discovery, report: VerifyReport | None) -> None:
    """Refuse what may be called past the model's modules, unless both modes were compared and all calls agree."""
    for finding in discovery.of(CONVERTIBLE):
        counted = set() if report is None else {
            check.mode for check in report.of(EQUAL) if check.what == "calls" and check.where == finding.path
        }  # fmt: skip
        if finding.suspected is not None and (report is None or not report.ok or counted != {"train", "eval"}):
            raise ConversionError.of(finding.suspected)


def _cleared_of_bypass(discovery: Discovery, conversion: Conversion) -> list[Diagnostic]:
    """One note for each collection that verification has cleared; without verification they are refused."""
    if conversion.verification is None:
        _refuse_suspected(discovery, None)
    return [
        Diagnostic(
            "bypass_not_called",
            finding.path,
            f"the sample does not call it past the model's modules; other inputs might: {finding.suspected.message}",
            "let the model reach it by attributes of its modules alone.",
        )
        for finding in discovery.of(CONVERTIBLE)
        if finding.suspected is not None
    ]


def _as_whole_graph(converted: nn.Module, call: Sample | None) -> nn.Module:
    assert call is not None
    if isinstance(converted, (WholeGraph, ConvertedCollection)):
        return converted  # the collection is a graph already
    graph = make_whole_graph(unwrap(converted), call)
    leave_to_collections(graph)
    if sharded_collections(graph):
        attach_fused_optimizer(graph)
    return graph


def _patch(
    model: nn.Module, converted: nn.Module, replacements: Mapping[int, nn.Module], findings: list[Finding]
) -> nn.Module:
    if id(model) in replacements:
        return converted
    for finding in findings:
        if id(finding.module) in replacements:  # hooks and attributes were made to lead to the copy's modules
            carry_references(finding.module, replacements[id(finding.module)])
    replace_in_place(model, replacements)
    attach_conversion(model, conversion_of(converted))
    return model
