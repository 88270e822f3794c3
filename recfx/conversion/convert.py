"""``recfx.convert``: the whole pipeline, top to bottom, one named step per line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recfx.conversion.arguments import check_arguments
from recfx.conversion.check_conversion import check_conversion
from recfx.conversion.declared_ranges import declare_id_ranges
from recfx.conversion.finish import as_whole_graph, patch
from recfx.conversion.load_guard import guard_loading
from recfx.conversion.notes import compile_dropped
from recfx.conversion.placement import place
from recfx.conversion.refusals import (
    DEFAULT_HASHING,
    refuse_other_request,
    refuse_raw_ids_of_kept,
    refuse_sharded,
    refuse_unsupported,
)
from recfx.conversion.sharding import shard_model, sharded_replacements
from recfx.conversion.trace_directory import ConversionTrace, Stages
from recfx.discovery.classify import CONVERTED, CONVERTIBLE
from recfx.discovery.discover import discover
from recfx.discovery.recorded import recorded
from recfx.modules.copy_modules import copy_modules
from recfx.record.conversion import attach_conversion, conversion_of
from recfx.replacement.replace_collections import Hashing, replace_collections
from recfx.replacement.resize_tables import TableResizing
from recfx.tracing.sample import Sample


def convert(
    model: nn.Module,
    sample: Any = None,
    *,
    hashing: Hashing = DEFAULT_HASHING,
    plan: ShardingPlan | None = None,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    whole_graph: bool = False,
    verify: bool | None = None,
    inplace: bool = False,
    on_unsupported: str = "error",
    id_ranges: Mapping[str, tuple[int, int]] | None = None,
) -> nn.Module:
    """Rewrite every ``EmbeddingBagCollection`` of ``model`` to a ``HashEmbeddingBagCollection`` of explicit nodes.

    Outputs, weights, parameter names and parameter objects stay the same. Without ``hashing=``, ids are row numbers and
    are range-checked; with ``HashConfig(dense_rows=0)`` they are raw 64-bit ids.

    Args:
        model: any module.
        sample: one call of it, as a tuple of positional arguments or a :class:`Sample`. Used to confirm where the
            collections are called, and to verify the result.
        hashing: one config for every table, None for static tables, or a dict by table name (tables that it does not
            name get the default).
        plan: TorchRec's sharding plan, by fully qualified name of the collections. The collections of the result are
            sharded, and each rank has its own part of the weights of ``model``; every rank must call ``convert``. The
            result has ``fused_optimizer``, as a ``DistributedModelParallel`` does.
        env: the ranks to shard over; with it and without ``plan``, ``recfx.plan`` makes one. Default: all ranks.
        device: move the result there; tables on meta are allocated and initialised.
        backend: kernel target of the lookups; ``"auto"`` takes the first one that can serve each lookup.
        whole_graph: return the whole model as a graph (one for train and one for eval, over shared modules); needs a
            sample.
        verify: compare copies of the model and the result: outputs, gradients and one step. None: do so if there is a
            sample and the parameters take no more than 2 GiB.
        inplace: False makes new module objects around the same parameters, and the original still runs: helper objects
            and functions that refer to its modules (by attributes, closures or weak references) are copied, too. True
            patches the parents of the collections and everything else that refers to them (a model that is a collection
            itself is replaced: use the return value).
        id_ranges: the lowest and the highest id of features, as they reach their collections. Where these, or what the
            model does to the ids of ``sample`` (``%``, ``clamp``, ...), show that all ids of an unsharded table are
            below ``dense_rows``, its index is left out of the graph; every batch is checked.
        on_unsupported: ``"error"``, or ``"keep"`` to leave what cannot be converted as it is; the report lists it.

    Returns:
        the converted model. ``recfx.explain`` says what was done to it.

    Raises:
        ConversionError: with a reason code; the model is as it was.
    """
    trace, stages = ConversionTrace.begin(model), Stages()
    try:
        converted = _convert(
            model, sample, hashing, plan, env, device, backend, whole_graph, verify, inplace, on_unsupported, id_ranges,
            stages,
        )  # fmt: skip
    except BaseException as error:
        if trace is not None:
            trace.failure(error, stages)
        raise
    if trace is not None:
        trace.result(converted, stages)
    return converted


def _convert(
    model: nn.Module,
    sample: Any,
    hashing: Hashing,
    plan: ShardingPlan | None,
    env: ShardingEnv | None,
    device: torch.device | str | None,
    backend: str,
    whole_graph: bool,
    verify: bool | None,
    inplace: bool,
    on_unsupported: str,
    id_ranges: Mapping[str, tuple[int, int]] | None,
    stages: Stages,
) -> nn.Module:
    call = None if sample is None else Sample.of(sample)
    check_arguments(model, call, plan, env, whole_graph, verify, on_unsupported)
    sharded, keep = plan is not None or env is not None, on_unsupported == "keep"
    verified = call is not None if verify is None else verify
    discovery = discover(model, call, calls_are_counted=verified and not keep)
    declare_id_ranges(discovery, id_ranges)
    refuse_unsupported(discovery, on_unsupported)
    if sharded:
        refuse_sharded(discovery)
    stages.done("discover")
    if discovery.of(CONVERTED) and not discovery.of(CONVERTIBLE):
        refuse_other_request(discovery, hashing, backend)
        if sharded:
            model = shard_model(model, plan, env, device, inplace)
            stages.done("shard, and run the passes")
        place(model, device)
        guard_loading(model)
        model = as_whole_graph(model, call) if whole_graph else model
        stages.done("make a whole graph" if whole_graph else "place, and patch")
        return model
    with TableResizing(under_ddp=_holds_ddp(model)) as resizing:
        replacements = replace_collections(discovery.of(CONVERTIBLE), hashing, backend, resizing, keep)
        if not keep and not isinstance(hashing, Mapping):
            refuse_raw_ids_of_kept(discovery, replacements)
        converted, _ = copy_modules(model, replacements)
        stages.done("replace, and run the passes")
        conversion = recorded(discovery, on_unsupported, before=conversion_of(model))
        conversion.notes += compile_dropped(model, inplace)
        attach_conversion(converted, conversion)
        if verified:
            conversion.notes += check_conversion(model, converted, call, conversion, discovery, asked=bool(verify))
            stages.done("verify")
        if sharded:
            before = converted
            converted = shard_model(converted, plan, env, device, inplace=False)
            replacements = sharded_replacements(replacements, before, converted)
            stages.done("shard, and run the passes")
        place(converted, device)
        guard_loading(converted)
        if whole_graph:
            converted = as_whole_graph(converted, call)
        elif inplace:
            converted = patch(model, converted, replacements, discovery.findings)
            guard_loading(converted)
        resizing.keep()
        stages.done("make a whole graph" if whole_graph else "place, and patch")
    return converted


def _holds_ddp(model: nn.Module) -> bool:
    return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())
