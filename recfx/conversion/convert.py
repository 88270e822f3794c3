"""``recfx.convert``: the whole pipeline, top to bottom, one named step per line; and ``recfx.trace``."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import fx, nn
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.converted_collection import ConvertedCollection, converted_collections
from recfx.collections.copy_modules import carry_hooks, copy_modules, replace_in_place
from recfx.collections.first_use import first_use
from recfx.collections.replaced import catch_calls, refuse_calls
from recfx.collections.sharding.collection import sharded_collections
from recfx.collections.sharding.shard import leave_to_collections
from recfx.collections.whole_graph import WholeGraph, check_modes
from recfx.collections.wrappers import not_on_meta_by_default, unwrap, usable_device
from recfx.conversion.decide import decide
from recfx.conversion.request import DEFAULT_HASHING, Request, named_passes
from recfx.conversion.whole_graph import build_whole_graph, make_whole_graph, sample_failed
from recfx.errors import ConversionError
from recfx.errors.argument_types import typed
from recfx.hashing import HashConfig
from recfx.models.conversion_record import add_notes, attach_conversion, conversion_of
from recfx.models.replace_collections import carry_attributes
from recfx.models.resize_tables import TableResizing
from recfx.models.sample import Sample
from recfx.optim.keyed_optimizer import attach_fused_optimizer
from recfx.passes import Pass
from recfx.planner.plan import environment, plan_for, shard_collections
from recfx.planner.priced_plan import price_of

Ready = Callable[[nn.Module, Mapping[str, ConvertedCollection]], None]

WHEN_READY: list[Ready] = []
"""Each is called with the result, which has the record of the conversion, and with its collections, before the model of
the user changes, and again for what has changed since. An error ends the conversion.
"""


@typed(ConversionError)
def convert(
    model: nn.Module,
    sample: Any = None,
    *,
    hashing: HashConfig | Mapping[str, HashConfig | None] | None = DEFAULT_HASHING,
    plan: ShardingPlan | None = None,
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
) -> nn.Module:
    """Rewrite every ``EmbeddingBagCollection`` and ``EmbeddingCollection`` of ``model`` to a graph of explicit nodes.

    They become a ``HashEmbeddingBagCollection`` or a ``HashEmbeddingCollection``.

    Outputs, weights, parameter names and parameter objects stay the same. Without ``hashing=``, ids are row numbers and
    are range-checked; with ``HashConfig.raw_ids()`` they are raw 64-bit ids.

    Example:
        >>> adopted = recfx.convert(Model(), sample)  # ids are row numbers, as they were
        >>> model = recfx.convert(Model(), sample, hashing=recfx.HashConfig.raw_ids())
        >>> model(batch).shape
        torch.Size([2, 1])
        >>> model.ebc.index("users").items()  # ids, and their rows
        (tensor([41, 42]), tensor([0, 1]))

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
        device: move the result there; tables on meta are allocated and initialised; nothing else may be on meta.
        backend: kernel target of the lookups; ``"auto"`` takes the first one that can serve each lookup.
        whole_graph: return the whole model as a graph (one for train and one for eval, over shared modules); needs a
            sample.
        verify: compare copies of the model and the result: outputs, gradients and one step. None: do so if there is a
            sample and the parameters take no more than 2 GiB.
        inplace: False makes new module objects around the same parameters, which both models train: what
            ``copy.deepcopy`` makes, but for parameters, buffers and what cannot be copied. The original still runs,
            with the rows that ``hashing`` adds to its tables (``original_has_more_rows``). A second conversion of the
            same model also trains these parameters, and with indexes each of the two gives the same rows to ids of its
            own: convert ``copy.deepcopy(model)`` if both are to be trained. Nothing warns of it.
            True patches the parents of the collections, and attributes, lists, dicts and bound methods that refer to
            them (a model that is a collection itself is replaced: use the return value). Whatever else still calls an
            original collection, such as a closure, gets ``replaced_collection_called``: in a copy, while it runs.
        id_ranges: the lowest and the highest id of features, as they reach their collections. Where these show that all
            ids of an unsharded table are below ``dense_rows``, its index is left out of the graph; every batch is
            checked.
        passes: the passes that make the graph of each collection, in order: ``[*recfx.passes(), mine]`` adds one. It
            has a ``name`` and a method ``call(graph)``, which edits a :class:`recfx.ir.operator_graph.OperatorGraph`
            and returns a ``recfx.passes.PassResult``. The same passes run again when an optimizer is attached, when the
            model is sharded, and (but for those of recfx that files have no use for) when it is exported. Default:
            ``recfx.passes()``. ``recfx.add_operator`` declares the operators that a pass adds.
        managed_collisions: ``"convert"`` also converts TorchRec's managed-collision collections: the output stays a
            tuple, and every id that their MCH or HashZch modules have learned keeps its row, with weights and
            optimizer state. The index gives rows to new ids from then on, by the rules that come closest, or by those
            of ``hashing``; ``recfx.explain`` says what differs. ``"keep"`` leaves them as they are, and pooled ones are
            refused like all that cannot be converted.
        dedup: whether sharded tables whose rows are not pooled send each different id of a key once per batch, and get
            its row back once. Results are the same but for the order of sums in gradients. ``"auto"`` does so where it
            is expected to pay, which needs to know the share of different ids: a dict gives it by table name, a
            number from 0 to 1, or says True or False. True and False are for all tables.
        on_unsupported: ``"error"``, or ``"keep"`` to leave what cannot be converted as it is; the report lists it.

    Returns:
        the converted model. ``recfx.explain`` says what was done to it.

    Raises:
        ConversionError: with a reason code; the model is as it was.
    """
    first_use()
    call = None if sample is None else Sample.of(sample)
    asked = Request(
        call, hashing, plan, env, device, backend, whole_graph, verify, inplace, on_unsupported, id_ranges,
        named_passes(passes), managed_collisions, dedup,
    )  # fmt: skip
    with not_on_meta_by_default():
        return _convert(model, asked)


def _ready(converted: nn.Module, collections: Mapping[str, ConvertedCollection]) -> None:
    for observe in WHEN_READY:
        observe(converted, collections)


def _convert(model: nn.Module, asked: Request) -> nn.Module:
    asked.check(model)
    with TableResizing(model) as resizing:
        decision = decide(model, asked, resizing)
        converted = model if decision.converted is None else decision.converted
        replaced = decision.replaced_in(model)
        if asked.shards:
            if decision.converted is None:  # they were converted by an earlier call
                replaced |= unsharded_collections(converted)
            converted = _shard_model(converted, asked, asked.inplace and decision.converted is None)
        _ready(converted, converted_collections(converted))
        if asked.device is not None:
            _place(converted, asked.device)
            _ready(converted, converted_collections(converted))  # other kernels may serve the tables there
        whole = as_whole_graph(converted, asked.call) if asked.whole_graph else None
        if asked.inplace and decision.converted is not None:
            converted = _patch(model, converted, replaced)
        converted = converted if whole is None else whole
        resizing.keep()
        for path, original in replaced.items() if asked.inplace else ():
            refuse_calls(original, path)
        if replaced and not asked.inplace and "" not in replaced:  # otherwise, nothing of the user's runs
            catch_calls(converted, replaced)
    return converted


def as_whole_graph(converted: nn.Module, call: Sample | None) -> nn.Module:
    """The converted model as a train and an eval graph over its modules."""
    assert call is not None
    if isinstance(converted, (WholeGraph, ConvertedCollection)):
        return converted  # a collection is a graph already
    graph = make_whole_graph(unwrap(converted), call)
    leave_to_collections(graph)
    if sharded_collections(graph):
        attach_fused_optimizer(graph)
    return graph


def _patch(model: nn.Module, converted: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """Put what has replaced modules, by path, into ``model``, and return it; one that is replaced itself stays."""
    replacements = {id(original): converted.get_submodule(path) for path, original in replaced.items()}
    if id(model) in replacements:
        return converted
    for original in replaced.values():  # their hooks and attributes refer to the modules of the copy
        carry_attributes(original, replacements[id(original)])
        _hand_over_hooks(original, replacements[id(original)])
    replace_in_place(model, replacements)
    attach_conversion(model, conversion_of(converted))
    leave_to_collections(model)
    if sharded_collections(model):
        attach_fused_optimizer(model)
    return model


def _hand_over_hooks(original: nn.Module, replacement: nn.Module) -> None:
    """Give ``replacement`` the hooks of a collection and, unless it is sharded, those of its tables."""
    own = dict(replacement.named_modules()) if isinstance(replacement, UnshardedCollection) else {"": replacement}
    for path, module in original.named_modules():
        if own.get(path, module) is not module:
            carry_hooks(module, own[path], for_good=True)


def _shard_model(converted: nn.Module, asked: Request, inplace: bool) -> nn.Module:
    """Shard the collections over all ranks; the rest of the model stays as it is."""
    conversion = conversion_of(converted)  # it is stored on the root, which may be a collection itself
    env = environment(asked.env)
    plan = plan_for(converted, asked.plan, env, asked.device)
    sharded = shard_collections(converted, plan, env, asked.device)
    if inplace and id(converted) not in sharded:
        collections = unsharded_collections(converted)
        _ready(converted, {path: sharded[id(collection)] for path, collection in collections.items()})
        for collection in collections.values():
            _hand_over_hooks(collection, sharded[id(collection)])
        replace_in_place(converted, sharded)
        model = converted
    else:
        model, _ = copy_modules(converted, sharded)
    attach_conversion(model, conversion)
    add_notes(model, price_of(plan))
    leave_to_collections(model)
    attach_fused_optimizer(model)
    return model


def _place(converted: nn.Module, device: torch.device | str) -> None:
    """Move the model; tables on meta are allocated and initialised."""
    device = usable_device(device)
    for collection in unsharded_collections(converted).values():
        if any(weight.is_meta for weight in collection.parameters()):
            collection.to_empty(device=device)
            collection.reset_parameters()
    converted.to(device)


@typed(ConversionError)
def trace(model: nn.Module, sample: Any) -> fx.GraphModule:
    """The whole-model graph of the mode that ``model`` is in, with every collection as explicit nodes.

    A model that is not converted yet is not changed: a copy of it is converted, as ``convert`` does by default. Each
    module that holds no collection is one call; so is each module that cannot be traced
    (``graph_module.meta["recfx_rollbacks"]`` says why). The graph can be run: it agrees with the Python model at two
    batch sizes, and shares its modules. With sharded collections that comparison communicates: every rank calls
    ``trace``, each with its own sample. It stays the graph of that mode: its ``train()`` and ``eval()`` set that of the
    modules that it calls, as for any graph of torch.fx; ``convert(whole_graph=True)`` has a graph for each mode.

    Example:
        >>> graph_module = recfx.trace(Model(), sample)
        >>> [node.name for node in graph_module.graph.nodes]
        ['features', 'ebc_select_features', 'ebc_lookup', 'ebc_keyed_tensor', 'getitem', 'over', 'output']

    Args:
        model: any model with standard or converted collections.
        sample: one call of it, as for ``convert``.

    Raises:
        ConversionError: ``untraceable_root``, ``whole_graph_differs``, ``mixed_modes``,
            ``sample_failed``, or what ``convert`` refuses.
    """
    call = Sample.of(sample)
    if isinstance(model, WholeGraph):
        return model.graph_module
    converted = unwrap(convert(model, call, verify=False, on_unsupported="keep"))
    if isinstance(converted, ConvertedCollection):
        return converted.graph_module
    traced = build_whole_graph(converted, call, converted.training)
    if traced.not_compared is not None:
        raise sample_failed(traced.not_compared) from traced.not_compared
    check_modes(converted, converted.training, traced.entered)
    traced.graph_module.meta["recfx_rollbacks"] = traced.rollbacks
    attach_conversion(traced.graph_module, conversion_of(converted))
    return traced.graph_module
