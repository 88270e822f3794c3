"""An ordinary ``torch.optim`` optimizer in a checkpoint: its state by the names of parameters, not their numbers.

It may be inside TorchRec's wrappers, of which a warm-up has a state of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from recfx.checkpoint.contents import mismatch
from recfx.checkpoint.settings import NOT_SETTINGS, check_settings_fit, check_state_fits
from recfx.checkpoint.storage import Parts
from recfx.checkpoint.table_names import NamedTable, sharded_parameters, sharded_tables
from recfx.collections.sharding.optimizer import ShardedFusedOptimizer
from recfx.errors import CheckpointError, type_of, with_article
from recfx.ir.shard import Shard
from recfx.optim.keyed_optimizer import FusedKeyedOptimizer

BUILD_AS_SAVED = "build the optimizer as it was built when saving, or load without optimizer=."
_FUSED = (ShardedFusedOptimizer, FusedKeyedOptimizer, EmptyFusedOptimizer)
_AROUND_ONE = (KeyedOptimizerWrapper, WarmupOptimizer, GradientClippingOptimizer)


def wrappers_around_one(optimizer: object) -> list[Any]:
    """The wrappers of a single optimizer, from the outermost to the innermost; not those that users derived."""
    return [each for _, each in _everything(optimizer) if type(each) in _AROUND_ONE]


def not_fused(optimizer: object) -> list[Any]:
    """The innermost optimizers, without the fused ones, which are saved with the model."""
    inside = (CombinedOptimizer, *_FUSED)
    return [
        each for _, each in _everything(optimizer) if not isinstance(each, inside) and type(each) not in _AROUND_ONE
    ]


def _everything(optimizer: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    yield place, optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for number, (_, each) in enumerate(optimizer.optimizers):
            yield from _everything(each, f"{place}.{number}" if place else f"{number}")
    elif type(optimizer) in _AROUND_ONE:
        yield from _everything(optimizer._optimizer, f"{place}.inner" if place else "inner")


def _warm_ups(optimizer: object) -> dict[str, WarmupOptimizer]:
    return {place: each for place, each in _everything(optimizer) if isinstance(each, WarmupOptimizer)}


def warm_up_states(optimizer: object) -> dict[str, list[int]]:
    """How far each warm-up is: its number of steps and of the stage that it is in, by its place in ``optimizer``."""
    return {place: list(each._get_warmup_state()) for place, each in _warm_ups(optimizer).items()}


def plan_warm_ups(optimizer: object, saved: Mapping[str, Any]) -> list[tuple[WarmupOptimizer, list[int]]]:
    """The warm-ups of ``optimizer``, each with its saved state, for ``load_warm_ups``.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    found = _warm_ups(optimizer)
    if found.keys() != saved.keys():
        raise mismatch(
            f"warm-ups were saved at {sorted(saved)} of optimizer=, here they are at {sorted(found)}.",
            module_path="optimizer",
            what_to_do=BUILD_AS_SAVED,
        )
    for place, each in found.items():
        if saved[place][1] >= len(each._stages):
            raise mismatch(
                f"a warm-up was saved in its stage {saved[place][1]}, but here it has {len(each._stages)}.",
                module_path="optimizer",
                what_to_do=BUILD_AS_SAVED,
            )
    return [(each, saved[place]) for place, each in found.items()]


def load_warm_ups(planned: list[tuple[WarmupOptimizer, list[int]]]) -> None:
    """Set states and learning rates. From the innermost, as the outermost has the last word when they step."""
    for each, (steps, stage) in reversed(planned):
        each.state[each._warmup_param] = {"warmup": torch.tensor([steps, stage], dtype=torch.long, device="cpu")}
        each._set_lr(steps, stage)


@dataclass
class DescribedOptimizer:
    """The content of ``optimizer.state_dict()``.

    Args:
        tensors: by ``<parameter>.<state>``; without those of sharded tables.
        sharded: this rank's parts of the tensors of sharded tables.
        values: everything else.
    """

    tensors: dict[str, Tensor]
    sharded: dict[str, Tensor | Parts]
    values: dict[str, Any]


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The ``torch.optim`` optimizer inside TorchRec's wrappers and ``CombinedOptimizer``.

    None if there are only fused ones, which are saved with the model.

    Raises:
        CheckpointError: ``optimizer_not_supported``.
    """
    found = not_fused(optimizer)
    if not found:
        return None
    if len(found) > 1:
        raise _not_supported(f"optimizer= has {len(found)} optimizers that are not fused.")
    (inner,) = found
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, KeyedOptimizer):
        raise _not_supported(f"optimizer= is {type_of(inner)}.")
    return inner


def _not_supported(message: str) -> CheckpointError:
    return CheckpointError(
        message,
        reason="optimizer_not_supported",
        what_to_do="pass a torch.optim.Optimizer; fused optimizers are saved with the model.",
    )


def load_state(optimizer: Any, state: dict[str, Any]) -> Callable[[], None]:
    """``load_state_dict`` of the result of ``rebuild_state``: all or nothing.

    Returns:
        a function that undoes it.
    """
    (inner,), wrappers = not_fused(optimizer), wrappers_around_one(optimizer)
    before = [(each, each.state, each.param_groups) for each in (inner, *wrappers)]

    def undo() -> None:
        for each, state, groups in before:
            each.state, each.param_groups = state, groups

    try:
        inner.load_state_dict(state)
    except BaseException:
        undo()
        raise
    for each in reversed(wrappers):  # torch has replaced the objects that they know
        each.state, each.param_groups = each._optimizer.state, each._optimizer.param_groups
    return undo


def describe_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> DescribedOptimizer:
    """What ``optimizer.state_dict()`` says.

    Raises:
        CheckpointError: ``optimizer_not_supported``: it steps parameters that are not in ``model``, or has a state of
            a sharded table that is not cut as the table is.
    """
    names, where = _names(optimizer, model)
    foreign = [number for number, name in enumerate(names) if name == f"#{number}"]
    if foreign:
        raise CheckpointError(
            f"optimizer= updates {len(foreign)} parameters that the model lacks; the first is its number {foreign[0]}.",
            reason="optimizer_not_supported",
            what_to_do="pass an optimizer of parameters of this model; save other optimizers with torch.save.",
        )
    saved = _state_dict(optimizer)
    found = DescribedOptimizer({}, {}, {})
    values: dict[str, dict[str, Any]] = {}
    for number, state in saved["state"].items():
        name = names[number]
        values[name] = {"values": {}, "tensors": []}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                values[name]["values"][key] = value
                continue
            values[name]["tensors"].append(key)
            if where[number] is None:
                found.tensors[f"{name}.{key}"] = value.detach()
            else:
                _add_part(found.sharded, f"{name}.{key}", value, *where[number])
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
    found.values = {"kind": type(optimizer).__name__, "groups": groups, "state": values}
    return found


def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Without what a warm-up keeps there, for a parameter that the optimizer does not have: torch cannot number it."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    whole = optimizer.state
    optimizer.state = defaultdict(dict, {each: state for each, state in whole.items() if id(each) in stepped})
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = whole


def _add_part(tensors: dict[str, Tensor | Parts], name: str, value: Tensor, table: NamedTable, shard: Shard) -> None:
    size = whole_state_size(name, tuple(value.shape), table, shard)
    if shard not in table.own_saved_shards():
        return
    if size == ():
        if table.table.saved[0] == shard:
            tensors[name] = value.detach()
        return
    parts = tensors.setdefault(name, Parts(size))
    assert isinstance(parts, Parts)
    parts.put((shard.rows[0], shard.columns[0] if size[1] > 1 else 0), value)


def whole_state_size(name: str, part: tuple[int, ...], table: NamedTable, shard: Shard) -> tuple[int, ...]:
    """The size of the state of a whole table, of which a shard has a part.

    Raises:
        CheckpointError: ``optimizer_not_supported``.
    """
    (first, end), (left, right), spec = shard.rows, shard.columns, table.table.table
    if part == (end - first, right - left):
        return spec.num_embeddings, spec.embedding_dim
    if part == (end - first, 1) and right - left == spec.embedding_dim:
        return spec.num_embeddings, 1
    if part == ():
        return ()
    raise _not_supported(f"the state {name} of a sharded table is {part}, its shard {(end - first, right - left)}.")


def join_described(described: list[dict[str, Any]], model: nn.Module) -> dict[str, Any]:
    """Join what the ranks say about their optimizers, which update shards of different tables.

    Raises:
        CheckpointError: ``optimizer_not_supported``: they have different numbers of groups.
    """
    first = described[0]
    if any(len(each["groups"]) != len(first["groups"]) for each in described):
        raise _not_supported("optimizer= does not have the same number of groups on all ranks.")
    state: dict[str, Any] = {}
    for each in described:
        for name, values in each["state"].items():
            state.setdefault(name, values)
    tables = {table.weight for table in sharded_tables(model)}
    groups, any_order = [], False
    order = {name: place for place, name in enumerate(model.state_dict())}
    for number, group in enumerate(first["groups"]):
        names = list(dict.fromkeys(name for each in described for name in each["groups"][number]["params"]))
        if tables.intersection(names):  # no rank knows their order
            any_order = True
            names.sort(key=lambda name: order.get(name, -1))
        groups.append({**group, "params": names})
    joined = {"kind": first["kind"], "groups": groups, "state": state}
    return {**joined, "any_order": True} if any_order else joined


def rebuild_state(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    described: Mapping[str, Any],
    read: Callable[[str, tuple[NamedTable, Shard] | None], Tensor],
    shape_of: Callable[[str], Tensor],
) -> dict[str, Any]:
    """The ``state_dict`` for ``optimizer``, checked against its parameters. Changes nothing.

    Args:
        optimizer: the optimizer that is to load the state.
        model: the model whose parameters it updates.
        described: what was saved besides tensors.
        read: returns a saved tensor by ``<parameter>.<state>``, or a shard's part of it.
        shape_of: returns shape and dtype of a saved tensor, so that a tensor that does not fit is not even read.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    names, where = _names(optimizer, model)
    if described["kind"] != type(optimizer).__name__:
        raise mismatch(
            f"the saved optimizer is {with_article(described['kind'])}, this one is {type_of(optimizer)}.",
            module_path="optimizer",
            what_to_do=BUILD_AS_SAVED,
        )
    saved_groups = [group["params"] for group in described["groups"]]
    ordered = iter(names)
    groups = [[next(ordered) for _ in group["params"]] for group in optimizer.param_groups]
    if not _same_groups(saved_groups, groups, described, model):
        raise mismatch(
            f"the saved optimizer updates {saved_groups}, this one updates {groups}.",
            module_path="optimizer",
            what_to_do=BUILD_AS_SAVED,
        )
    for saved, current in zip(described["groups"], optimizer.param_groups, strict=True):
        check_settings_fit(saved, current, "optimizer")
    numbered = iter(range(len(names)))
    rebuilt = [
        {
            **{key: value for key, value in group.items() if key in optimizer.defaults},  # settings not in `saved`
            **{key: value for key, value in saved.items() if key not in NOT_SETTINGS},
            "params": [next(numbered) for _ in group["params"]],
        }
        for saved, group in zip(described["groups"], optimizer.param_groups, strict=True)
    ]
    state: dict[int, dict[str, Any]] = {}
    stepped = [
        (parameter, settings)
        for group, settings in zip(optimizer.param_groups, rebuilt, strict=True)
        for parameter in group["params"]
    ]
    for number, (name, of) in enumerate(zip(names, where, strict=True)):
        saved = described["state"].get(name)
        if saved is None:
            continue
        parameter, settings = stepped[number]
        whole = of is None
        tensors = {key: shape_of(f"{name}.{key}") if whole else read(f"{name}.{key}", of) for key in saved["tensors"]}
        check_state_fits(tensors, saved["values"], parameter, type(optimizer), settings, name)
        if whole:
            tensors = {key: read(f"{name}.{key}", None) for key in tensors}
        state[number] = {**saved["values"], **tensors}
    return {"state": state, "param_groups": rebuilt}


def _same_groups(
    saved: list[list[str]], groups: list[list[str]], described: Mapping[str, Any], model: nn.Module
) -> bool:
    """Whether the groups agree. With sharded tables the order does not count, and each rank has only its own tables."""
    tables = sharded_tables(model)
    elsewhere = {table.weight for table in tables if not table.local()}
    names = {name for group in saved for name in group}
    if not described.get("any_order") and not names.intersection(table.weight for table in tables):
        return saved == groups
    return [set(group) - elsewhere for group in saved] == [set(group) for group in groups]


def _names(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[list[str], list[tuple[NamedTable, Shard] | None]]:
    """A name for every parameter of the optimizer, in its order, and the shard that it is, if it is one."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    sharded = sharded_parameters(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    where = [sharded.get(id(parameter)) for parameter in parameters]
    names = [known.get(id(parameter), f"#{number}") for number, parameter in enumerate(parameters)]
    return [name if of is None else of[0].weight for name, of in zip(names, where, strict=True)], where
