"""``recfx.convert``: the whole pipeline, top to bottom, one named step per line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recfx.collections.converted_collection import share_forwards
from recfx.conversion.decide import decide
from recfx.conversion.finish import as_whole_graph, patch, place, shard_model, sharded_replacements
from recfx.conversion.load_guard import guard_loading
from recfx.conversion.request import DEFAULT_HASHING, Request, named_passes
from recfx.discovery.sample import Sample
from recfx.passes import Pass
from recfx.replacement.replace_collections import Hashing
from recfx.replacement.resize_tables import TableResizing


class Observer(Protocol):
    """What is told of one conversion."""

    def done(self, stage: str) -> None:
        """A stage has ended."""

    def failure(self, error: BaseException) -> None:
        """The conversion has failed."""

    def result(self, converted: nn.Module) -> None:
        """The conversion has succeeded."""


OBSERVERS: list[Callable[[nn.Module], Observer | None]] = []
"""Each is called with the model at the beginning of a conversion."""


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
    passes: Iterable[Pass] | None = None,
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
        passes: the passes that make the graph of each collection, in order: ``[*recfx.passes(), mine]`` adds one. It
            has a ``name`` and a method ``call(graph)``, which edits a :class:`recfx.ir.operator_graph.OperatorGraph`
            and returns a ``recfx.passes.PassResult``. The same passes run again when an optimizer is attached, when the
            model is sharded, and (but for those of recfx that files have no use for) when it is exported. Default:
            ``recfx.passes()``. ``recfx.add_operator`` declares the operators that a pass adds.
        on_unsupported: ``"error"``, or ``"keep"`` to leave what cannot be converted as it is; the report lists it.

    Returns:
        the converted model. ``recfx.explain`` says what was done to it.

    Raises:
        ConversionError: with a reason code; the model is as it was.
    """
    observers = [observer for observe in OBSERVERS if (observer := observe(model)) is not None]

    def done(stage: str) -> None:
        for observer in observers:
            observer.done(stage)

    try:
        call = None if sample is None else Sample.of(sample)
        asked = Request(
            call, hashing, plan, env, device, backend, whole_graph, verify, inplace, on_unsupported, id_ranges,
            named_passes(passes),
        )  # fmt: skip
        converted = _convert(model, asked, done)
    except BaseException as error:
        for observer in observers:
            observer.failure(error)
        raise
    for observer in observers:
        observer.result(converted)
    return converted


def _convert(model: nn.Module, asked: Request, done: Callable[[str], None]) -> nn.Module:
    asked.check(model)
    with TableResizing(model) as resizing:
        decision = decide(model, asked, resizing, done=done)
        converted = model if decision.converted is None else decision.converted
        replacements = decision.replacements
        if asked.shards:
            before, in_place = converted, asked.inplace and decision.converted is None
            converted = shard_model(converted, asked.plan, asked.env, asked.device, in_place)
            replacements = sharded_replacements(replacements, before, converted)
            done("shard, and run the passes")
        place(converted, asked.device)
        guard_loading(converted)
        share_forwards(converted)
        if asked.whole_graph:
            converted = as_whole_graph(converted, asked.call)
        elif asked.inplace and decision.converted is not None:
            converted = patch(model, converted, replacements, decision.discovery.findings)
            guard_loading(converted)
        resizing.keep()
        done("make a whole graph" if asked.whole_graph else "place, and patch")
    return converted
