"""TorchRec's own ways to shard a model, taught about converted collections.

``DistributedModelParallel`` and the planners look a sharder up by a module's exact class, in a list that scripts leave
out (TorchRec's defaults) or write themselves: ``[EmbeddingBagCollectionSharder()]``. The class of a converted
collection is not in these lists, so TorchRec would silently leave it unsharded, and each rank would train its own copy.
:func:`extend_torchrec` wraps these functions: if a model holds converted collections, they are sharded by the sharder
that would have sharded the standard ones. Other models are sharded as before.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import model_parallel, sharding_plan
from torchrec.distributed import shard as shard_module
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.planner import planners
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.converted_collection import converted_collections
from recfx.collections.first_use import wrap_once
from recfx.collections.hash_collections import all_converted_classes
from recfx.collections.kinds import KINDS, kind_of
from recfx.collections.raw_ids import refuse_returned_rows
from recfx.collections.sharding.plan import on_all_ranks_with_plan
from recfx.collections.sharding.shard import leave_to_collections
from recfx.collections.table_state import STRICT
from recfx.collections.whole_graph import refuse_graph
from recfx.errors import ConversionError
from recfx.models.conversion_record import add_notes
from recfx.planner.priced_plan import price_of, world_size_said
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder, Sharders, stock_defaults
from recfx.runtime.base import load_hooks
from recfx.versions.differences import ModelDeltaTrackerTrec, RawIdTracker


def extend_torchrec() -> None:
    """Let TorchRec's entry points shard converted collections; ``recfx/README.md`` says what each is replaced for."""
    order = ("module", "env", "device", "plan", "sharders")
    _wrap(DistributedDataParallel, "__new__", _new_data_parallel)
    model_parallel_init = partial(_with_sharders, ("self", *order), _around_model_parallel)
    _wrap(DistributedModelParallel, "__init__", model_parallel_init)
    _wrap(planners.EmbeddingShardingPlanner, "plan", partial(_with_sharders, ("self", "module", "sharders"), None))
    _wrap(shard_module, "_shard_modules", partial(_with_sharders, order, None))
    for module in (sharding_plan, model_parallel, planners, shard_module):
        _wrap(module, "get_default_sharders", _default_sharders)
    for kind in KINDS:
        _wrap(kind.sharder, "shard", _shard)
        _wrap(kind.sharded, "__init__", partial(_before, _refuse_converted))
    _wrap(nn.Module, "load_state_dict", _load_state_dict)
    for tracker in (ModelDeltaTrackerTrec, RawIdTracker):
        signature = inspect.signature(tracker.__init__)
        _wrap(tracker, "__init__", partial(_before, partial(_refuse_tracked, signature)))


def _wrap(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Let calls of one of TorchRec's functions be calls of ``by``, which gets that function as its first argument."""

    def extend(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def extended(*arguments: Any, **keywords: Any) -> Any:
            return by(original, *arguments, **keywords)

        return extended

    wrap_once(owner, name, extend)


# Which sharders a model needs


def sharders_for(model: nn.Module, listed: Sequence[ModuleSharder[nn.Module]]) -> Sequence[ModuleSharder[nn.Module]]:
    """``listed``, and sharders that shard converted collections as the listed ones shard standard ones."""
    classes = {type(collection): kind_of(collection) for collection in unsharded_collections(model).values()}
    if not classes:
        return listed
    sharders = _without_feature_processed(model, listed)
    sharder_types = {sharder.module_type for sharder in sharders}
    own = [sharder for sharder in sharders if isinstance(sharder, HashEmbeddingBagCollectionSharder)]
    ours = next((sharder for sharder in own if sharder.stock is None), None)
    for module_type, kind in sorted(classes.items(), key=lambda item: item[0].__qualname__):
        stock = next((sharder for sharder in reversed(sharders) if isinstance(sharder, kind.sharder)), None)
        if module_type in sharder_types:
            continue
        if ours is not None:
            sharders.append(ours.for_class(module_type))
        elif stock is not None:
            sharders.append(HashEmbeddingBagCollectionSharder(stock=stock, module_type=module_type))
    _refuse_other_codecs(listed, sharders)
    return sharders


def _refuse_other_codecs(listed: Sequence[ModuleSharder[nn.Module]], sharders: Sharders) -> None:
    """Refuse codecs of a sharder that does not shard the collection inside any more: rows would be float32."""
    ours = [sharder for sharder in sharders if isinstance(sharder, HashEmbeddingBagCollectionSharder)]
    quantizes = any(own.qcomm_codecs_registry for own in ours)
    for sharder in listed:
        inside = getattr(sharder, "_ebc_sharder", getattr(sharder, "_e_sharder", None))
        if inside is not None and inside.qcomm_codecs_registry and not quantizes:
            raise ConversionError(
                f"the {type(sharder).__name__} has a qcomm_codecs_registry, but converted collections are sharded by "
                "another sharder, which has none.",
                reason="quantized_communication",
                what_to_do=f"give it to the {type(inside).__name__} in the list of sharders, or to recfx.sharders().",
            )


def _without_feature_processed(model: nn.Module, listed: Sequence[ModuleSharder[nn.Module]]) -> Sharders:
    """The list without TorchRec's sharder of feature-processed collections, if these hold converted ones."""
    holders = [module for module in model.modules() if isinstance(module, FeatureProcessedEmbeddingBagCollection)]
    converted = [isinstance(holder._embedding_bag_collection, UnshardedCollection) for holder in holders]
    if not any(converted):
        return list(listed)
    if not all(converted):
        raise ConversionError(
            "some of the model's FeatureProcessedEmbeddingBagCollections hold a converted collection, some do not: "
            "TorchRec has one sharder for all of them.",
            reason="feature_processed",
            what_to_do="convert the whole model, or shard the others separately.",
        )
    return [sharder for sharder in listed if sharder.module_type is not FeatureProcessedEmbeddingBagCollection]


def _with_sharders(
    order: tuple[str, ...],
    around: Callable[[Mapping[str, Any]], AbstractContextManager[None]] | None,
    original: Callable[..., Any],
    /,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Call a function of TorchRec, whose first arguments ``order`` names, with the sharders that its model needs."""
    named = {**dict(zip(order, arguments, strict=False)), **keywords}
    model, listed, place = named.get("module"), named.get("sharders"), order.index("sharders")
    if not isinstance(model, nn.Module) or not unsharded_collections(model):
        return original(*arguments, **keywords)
    refuse_graph(model, ConversionError)
    refuse_returned_rows(model)
    sharders = named["sharders"] = sharders_for(model, stock_defaults() if listed is None else listed)
    if place < len(arguments):
        arguments = (*arguments[:place], sharders, *arguments[place + 1 :])
    else:
        keywords["sharders"] = sharders
    with nullcontext() if around is None else around(named):
        return original(*arguments, **keywords)


def _default_sharders(original: Callable[[], Sharders]) -> Sharders:
    """Add sharders of converted classes: ``construct_module_sharding_plan`` and others ask for the one of a class."""
    defaults = original()
    stocks: dict[Any, Any] = {type(sharder): sharder for sharder in defaults}
    return [
        *defaults,
        *(
            HashEmbeddingBagCollectionSharder(stock=stocks[kind.sharder], module_type=module_type)
            for kind in KINDS
            for module_type in all_converted_classes(kind)
        ),
    ]


def _shard(original: Callable[..., Any], sharder: Any, /, module: Any, *arguments: Any, **keywords: Any) -> Any:
    if isinstance(module, UnshardedCollection):
        ours = HashEmbeddingBagCollectionSharder(stock=sharder, module_type=type(module))
        return ours.shard(module, *arguments, **keywords)
    return original(sharder, module, *arguments, **keywords)


# What is refused, or said, where a script would train something else than it means to


@contextmanager
def _around_model_parallel(named: Mapping[str, Any]) -> Iterator[None]:
    parallel, env, group = named["self"], named.get("env"), dist.GroupMember.WORLD
    if isinstance(parallel, DMPCollection):
        raise ConversionError(
            "a DMPCollection synchronises copies of TorchRec's own lookup modules between groups of ranks: the tables "
            "of a converted collection would never be synchronised.",
            reason="two_dimensional_parallelism",
            what_to_do="use DistributedModelParallel; or leave the model unconverted.",
        )
    world_size = env.world_size if env is not None else 1 if group is None else group.size()
    plan = named.get("plan")

    def check() -> None:
        if plan is not None:
            world_size_said(plan, world_size)
        _refuse_left_out(named["module"], plan, named["sharders"], world_size)

    on_all_ranks_with_plan(group if env is None else env.process_group, plan, check)
    yield
    add_notes(parallel, price_of(parallel.plan))


def _refuse_left_out(
    model: nn.Module, plan: ShardingPlan | None, sharders: Sequence[ModuleSharder[nn.Module]], world_size: int
) -> None:
    """Refuse unsharded collections with an index or an optimizer in backward: each rank would train its own."""
    sharder_types = {sharder.module_type for sharder in sharders}
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    for path, collection in unsharded_collections(model).items():
        planned = plan is None or any(plan.plan.get(alias) for alias in paths[id(collection)])
        if type(collection) in sharder_types and planned:
            continue
        apart = [*collection.hash_indexes, *collection.fused_optimizers()]
        if planned and plan is not None:
            why = "the plan shards it, but no sharder in the list does"
        elif world_size < 2 or not apart:
            continue
        else:
            why = f"nothing shards it, and each of {world_size} ranks would train its own tables {sorted(set(apart))}"
        raise ConversionError(
            f"{why}.",
            reason="collection_left_out",
            module_path=path,
            what_to_do="pass sharders=recfx.sharders(), or leave sharders= out; make the plan from the converted "
            "model, with the same sharders.",
        )


def _before(check: Callable[..., None], original: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    """Call a method after ``check`` has looked at its arguments."""
    check(*arguments, **keywords)
    return original(*arguments, **keywords)


def _refuse_converted(_: object, module: nn.Module, *__: object, **___: object) -> None:
    if isinstance(module, UnshardedCollection):
        raise ConversionError(
            f"TorchRec's {kind_of(module).sharded.__name__} would leave out the indexes of a converted collection.",
            reason="wrong_sharded_class",
            module_path=module.collection,
            what_to_do=f"shard it with recfx.sharders(), or {kind_of(module).sharder.__name__}().shard.",
        )


def _refuse_tracked(signature: inspect.Signature, tracker: object, *arguments: Any, **keywords: Any) -> None:
    skipped = {*signature.bind(tracker, *arguments, **keywords).arguments.get("fqns_to_skip", ())}
    for model in (*arguments, *keywords.values()):
        for path in converted_collections(model) if isinstance(model, nn.Module) else ():
            if not skipped.intersection(path.split(".")):
                raise ConversionError(
                    f"{type(tracker).__name__} would be told of no lookup: a sharded collection of recfx runs a graph "
                    "of its own kernels, without TorchRec's lookup modules and their hooks.",
                    reason="torchrec_hook_not_called",
                    module_path=path,
                    what_to_do="leave the collections that it is for unconverted, so that TorchRec shards them; or "
                    "compare state_dict() before and after, where fused tables move only the rows that batches use.",
                )


def _new_data_parallel(original: Callable[..., Any], kind: type[Any], /, *arguments: Any, **keywords: Any) -> Any:
    """Instead of ``__new__``: a wrapper around ``__init__`` would be blamed for its warnings."""
    for value in (*arguments, *keywords.values()):  # a subclass may take its module in any position
        if isinstance(value, nn.Module):
            leave_to_collections(value)
    return object.__new__(kind)


def _check_indexes(model: nn.Module, state: object) -> None:
    """Check every saved index before anything of ``model`` is loaded: torch loads module by module.

    A collection checks itself later if a hook of the user may still rename its keys.
    """
    saved: dict[str, dict[str, Any]] = {}
    collections = converted_collections(model)
    for path in collections:
        parts = path.split(".")
        holders = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
        if path and not any(map(load_hooks, holders)):
            saved[f"{path}."] = {}
    for key, value in state.items() if saved and isinstance(state, Mapping) else ():
        end = key.find(".")
        while end >= 0 and key[: end + 1] not in saved:  # a scan of all keys per collection would be quadratic
            end = key.find(".", end + 1)
        if end >= 0:
            saved[key[: end + 1]][key] = value
    for start, of_collection in saved.items():
        collections[start.rstrip(".")].local_state(of_collection, start)


def _load_state_dict(original: Callable[..., Any], model: nn.Module, /, *arguments: Any, **keywords: Any) -> Any:
    """Tell converted collections whether the load is strict."""
    before = STRICT.set(bool(arguments[1] if len(arguments) > 1 else keywords.get("strict", True)))
    try:
        _check_indexes(model, arguments[0] if arguments else keywords.get("state_dict"))
        return original(model, *arguments, **keywords)
    finally:
        STRICT.reset(before)
