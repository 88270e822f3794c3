"""An ordinary ``torch.optim`` optimizer in a checkpoint: its state by the names of parameters, not their numbers.

It may be inside TorchRec's wrappers, of which a warm-up has a state of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from recfx.checkpoint import storage
from recfx.checkpoint.contents import OPTIMIZER, mismatch
from recfx.checkpoint.optimizer_fits import NOT_SETTINGS, check_settings_fit, check_state_fits
from recfx.checkpoint.saved_folder import SavedFolder
from recfx.checkpoint.sharded import read_rows
from recfx.checkpoint.storage import Parts
from recfx.checkpoint.table_names import NamedTable, sharded_parameters, sharded_tables
from recfx.collections.sharding.optimizer import ShardedFusedOptimizer
from recfx.errors import CheckpointError, type_of, with_article
from recfx.hashing.row_move import RowMove
from recfx.ir.shard import Shard
from recfx.optim.keyed_optimizer import FusedKeyedOptimizer

_FUSED = (ShardedFusedOptimizer, FusedKeyedOptimizer, EmptyFusedOptimizer)
_AROUND_ONE = (KeyedOptimizerWrapper, WarmupOptimizer, GradientClippingOptimizer)


def _unwrapped(optimizer: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The optimizer, and all optimizers inside it, from the outermost to the innermost, with their places."""
    yield place, optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for number, (_, inner) in enumerate(optimizer.optimizers):
            yield from _unwrapped(inner, f"{place}.{number}" if place else f"{number}")
    elif type(optimizer) in _AROUND_ONE:  # not in classes that users derived from them
        yield from _unwrapped(optimizer._optimizer, f"{place}.inner" if place else "inner")


def _not_fused(optimizer: object) -> list[Any]:
    """The innermost optimizers, without the fused ones, which are saved with the model."""
    optimizers = [inner for _, inner in _unwrapped(optimizer) if type(inner) not in _AROUND_ONE]
    return [inner for inner in optimizers if not isinstance(inner, (CombinedOptimizer, *_FUSED))]


def _warm_ups(optimizer: object) -> dict[str, WarmupOptimizer]:
    return {place: inner for place, inner in _unwrapped(optimizer) if isinstance(inner, WarmupOptimizer)}


def warm_up_states(optimizer: object) -> dict[str, list[int]]:
    """How far each warm-up is: its number of steps and of the stage that it is in, by its place in ``optimizer``."""
    return {place: list(warm_up._get_warmup_state()) for place, warm_up in _warm_ups(optimizer).items()}


def plan_warm_ups(optimizer: object, saved: Mapping[str, Any]) -> list[tuple[WarmupOptimizer, list[int]]]:
    """The warm-ups of ``optimizer``, each with its saved state, for ``load_warm_ups``.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    warm_ups = _warm_ups(optimizer)
    if warm_ups.keys() != saved.keys():
        raise _mismatch(f"warm-ups were saved at {sorted(saved)} of optimizer=, here they are at {sorted(warm_ups)}.")
    for place, warm_up in warm_ups.items():
        stage, stages = saved[place][1], len(warm_up._stages)
        if stage >= stages:
            raise _mismatch(f"a warm-up was saved in its stage {stage}, but here it has {stages}.")
    return [(warm_up, saved[place]) for place, warm_up in warm_ups.items()]


def load_warm_ups(planned: list[tuple[WarmupOptimizer, list[int]]]) -> None:
    """Set states and learning rates. From the innermost, as the outermost has the last word when they step."""
    for warm_up, (steps, stage) in reversed(planned):
        warm_up.state[warm_up._warmup_param] = {"warmup": torch.tensor([steps, stage], dtype=torch.long, device="cpu")}
        warm_up._set_lr(steps, stage)


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The ``torch.optim`` optimizer inside TorchRec's wrappers and ``CombinedOptimizer``.

    None if there are only fused ones, which are saved with the model.

    Raises:
        CheckpointError: ``optimizer_not_supported``.
    """
    optimizers = _not_fused(optimizer)
    if not optimizers:
        return None
    if len(optimizers) > 1:
        raise _not_supported(f"optimizer= has {len(optimizers)} optimizers that are not fused.", _ONE)
    (inner,) = optimizers
    if isinstance(inner, (list, tuple, dict)):
        raise _not_supported(f"optimizer= is {type_of(inner)}, not an optimizer.", _ONE)
    if not isinstance(inner, torch.optim.Optimizer) and callable(getattr(inner, "state_dict", None)):
        raise _not_supported(
            f"optimizer= is {type_of(inner)}, not an optimizer.",
            "pass the optimizer. A learning-rate scheduler is saved with the model, as the extra state of a module "
            "whose get_extra_state() and set_extra_state() call its state_dict() and load_state_dict(): see class Kept "
            "in recfx/checkpoint/README.md.",
        )
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, KeyedOptimizer):
        raise _not_supported(f"optimizer= is {type_of(inner)}.")
    return inner


_ONE = (
    "make one torch.optim optimizer for all of their parameters, with a group of parameters for each: "
    "Adam([{'params': a}, {'params': b, 'lr': 0.1}]). Fused optimizers are saved with the model."
)


def _not_supported(
    message: str, what_to_do: str = "pass a torch.optim.Optimizer; fused optimizers are saved with the model."
) -> CheckpointError:
    return CheckpointError(message, reason="optimizer_not_supported", what_to_do=what_to_do)


def _mismatch(
    message: str, what_to_do: str = "build the optimizer as it was built when saving, or load without optimizer=."
) -> CheckpointError:
    return mismatch(message, module_path="optimizer", what_to_do=what_to_do)


def load_state(optimizer: Any, state: dict[str, Any]) -> Callable[[], None]:
    """``load_state_dict`` of the result of ``rebuild_state``: all or nothing.

    Returns:
        a function that undoes it.
    """
    (inner,) = _not_fused(optimizer)
    wrappers = [wrapper for _, wrapper in _unwrapped(optimizer) if type(wrapper) in _AROUND_ONE]
    before = [(part, part.state, part.param_groups) for part in (inner, *wrappers)]

    def undo() -> None:
        for part, state, groups in before:
            part.state, part.param_groups = state, groups

    try:
        inner.load_state_dict(state)
    except BaseException:
        undo()
        raise
    for wrapper in reversed(wrappers):  # torch has replaced the objects that they know
        wrapper.state, wrapper.param_groups = wrapper._optimizer.state, wrapper._optimizer.param_groups
    return undo


@dataclass
class DescribedOptimizer:
    """The content of ``optimizer.state_dict()``.

    Args:
        tensors: the tensors, by ``<parameter>.<state>``, without those of sharded tables.
        sharded: this rank's parts of the tensors of sharded tables.
        values: everything else.
    """

    tensors: dict[str, Tensor]
    sharded: dict[str, Tensor | Parts]
    values: dict[str, Any]


class _Stepped(NamedTuple):
    """A parameter that an optimizer updates; its name is ``#<number>`` if the model lacks it."""

    parameter: Tensor
    name: str
    shard: tuple[NamedTable, Shard] | None


def _stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[_Stepped]:
    """The parameters of all groups, in the order in which ``state_dict`` numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    sharded = sharded_parameters(model)
    stepped = []
    for number, parameter in enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]):
        shard = sharded.get(id(parameter))
        name = names.get(id(parameter), f"#{number}") if shard is None else shard[0].weight
        stepped.append(_Stepped(parameter, name, shard))
    return stepped


def describe_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> DescribedOptimizer:
    """What ``optimizer.state_dict()`` says.

    Raises:
        CheckpointError: ``optimizer_not_supported``: it steps parameters that are not in ``model``, or has a state of
            a sharded table that is not cut as the table is.
    """
    stepped = _stepped(optimizer, model)
    foreign = [number for number, parameter in enumerate(stepped) if parameter.name == f"#{number}"]
    if foreign:
        raise _not_supported(
            f"optimizer= updates {len(foreign)} parameters that the model lacks; the first is its number {foreign[0]}.",
            "pass an optimizer of parameters of this model; save other optimizers with torch.save.",
        )
    saved = _state_dict(optimizer)
    described = DescribedOptimizer({}, {}, {})
    values: dict[str, dict[str, Any]] = {}
    for number, state in saved["state"].items():
        _, name, shard = stepped[number]
        tensors = {key: value.detach() for key, value in state.items() if isinstance(value, Tensor)}
        rest = {key: value for key, value in state.items() if key not in tensors}
        values[name] = {"values": rest, "tensors": list(tensors)}
        for key, tensor in tensors.items():
            if shard is None:
                described.tensors[f"{name}.{key}"] = tensor
            else:
                _add_part(described.sharded, f"{name}.{key}", tensor, *shard)
    groups = [
        {**group, "params": [stepped[number].name for number in group["params"]]} for group in saved["param_groups"]
    ]
    described.values = {"kind": type(optimizer).__name__, "groups": groups, "state": values}
    return described


def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state without a warm-up's, which it keeps for a parameter that is not the optimizer's: it has no number."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    whole = optimizer.state
    optimizer.state = defaultdict(dict, {tensor: state for tensor, state in whole.items() if id(tensor) in stepped})
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
            tensors[name] = value
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
    if any(len(of_rank["groups"]) != len(first["groups"]) for of_rank in described):
        raise _not_supported("optimizer= does not have the same number of groups on all ranks.")
    state: dict[str, Any] = {}
    for of_rank in reversed(described):
        state.update(of_rank["state"])
    tables = {table.weight for table in sharded_tables(model)}
    groups, any_order = [], False
    order = {name: place for place, name in enumerate(model.state_dict())}
    for number, group in enumerate(first["groups"]):
        names = list(dict.fromkeys(name for of_rank in described for name in of_rank["groups"][number]["params"]))
        if tables.intersection(names):  # no rank knows their order
            any_order = True
            names.sort(key=lambda name: order.get(name, -1))
        groups.append({**group, "params": names})
    joined = {"kind": first["kind"], "groups": groups, "state": state}
    return {**joined, "any_order": True} if any_order else joined


def rebuild_state(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    folder: SavedFolder,
    described: Mapping[str, Tensor],
    saved: Mapping[str, Any] | None,
    moves: Mapping[str, RowMove],
) -> dict[str, Any]:
    """The ``state_dict`` for ``optimizer``, checked against its parameters. Changes nothing.

    Args:
        optimizer: the optimizer that is to load the state.
        model: the model whose parameters it updates.
        folder: the data folder.
        described: shapes and dtypes of everything that is saved, so that a tensor that does not fit is not even read.
        saved: what was saved besides tensors; None if the checkpoint has no optimizer.
        moves: the moves of tables that have more rows than saved, by weight name.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    if saved is None:
        raise _mismatch("the checkpoint was saved without optimizer=.", "load it without optimizer= as well.")
    moved = {name for name in described for weight in moves if name.startswith(f"{OPTIMIZER}{weight}.")}
    if moved:
        raise _mismatch(
            f"{min(moved)} has one entry per row of its table, and the table has more rows now.",
            "load without optimizer=; only fused optimizers follow their table's rows.",
        )
    if saved["kind"] != type(optimizer).__name__:
        raise _mismatch(f"the saved optimizer is {with_article(saved['kind'])}, this one is {type_of(optimizer)}.")
    stepped = _stepped(optimizer, model)
    numbers = iter(range(len(stepped)))
    numbered = [[next(numbers) for _ in group["params"]] for group in optimizer.param_groups]
    groups = [[stepped[number].name for number in group] for group in numbered]
    saved_groups = [group["params"] for group in saved["groups"]]
    if not _same_groups(saved_groups, groups, saved, model):
        raise _mismatch(f"the saved optimizer updates {saved_groups}, this one updates {groups}.")
    rebuilt: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    for saved_group, group, group_numbers in zip(saved["groups"], optimizer.param_groups, numbered, strict=True):
        check_settings_fit(saved_group, group, "optimizer")
        settings = {key: value for key, value in group.items() if key in optimizer.defaults}  # some may not be saved
        settings.update({key: value for key, value in saved_group.items() if key not in NOT_SETTINGS})
        rebuilt.append({**settings, "params": group_numbers})
        for number in group_numbers:
            if (entry := saved["state"].get(stepped[number].name)) is not None:
                tensors = _read_state(folder, described, stepped[number], entry, type(optimizer), settings)
                state[number] = {**entry["values"], **tensors}
    return {"state": state, "param_groups": rebuilt}


def _read_state(
    folder: SavedFolder,
    described: Mapping[str, Tensor],
    stepped: _Stepped,
    entry: Mapping[str, Any],
    optimizer: type,
    settings: Mapping[str, Any],
) -> dict[str, Tensor]:
    """The tensors of one parameter's state; for a shard, its part of them."""
    tensors = {key: described.get(f"{OPTIMIZER}{stepped.name}.{key}") for key in entry["tensors"]}
    state: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if tensor is None:
            raise _mismatch(f"the checkpoint lacks its state {f'{stepped.name}.{key}'!a}.")
        state[key] = (
            tensor if stepped.shard is None else _read_part(folder, f"{stepped.name}.{key}", tensor, *stepped.shard)
        )
    check_state_fits(state, entry["values"], stepped.parameter, optimizer, settings, stepped.name)
    if stepped.shard is not None:
        return state
    read = storage.read(folder, {f"{OPTIMIZER}{stepped.name}.{key}": tensor for key, tensor in state.items()})
    return dict(zip(state, read.values(), strict=True))


def _read_part(folder: SavedFolder, name: str, tensor: Tensor, table: NamedTable, shard: Shard) -> Tensor:
    if tensor.dim() == 0:
        return storage.read(folder, {OPTIMIZER + name: tensor})[OPTIMIZER + name]
    rows, dim = table.table.table.num_embeddings, table.table.table.embedding_dim
    if tuple(tensor.shape) not in ((rows, dim), (rows, 1)):
        raise _mismatch(f"the state {name!a} was saved as {tuple(tensor.shape)}, but the table is {(rows, dim)}.")
    (first, end), (left, right) = shard.rows, shard.columns if tensor.shape[1] == dim else (0, tensor.shape[1])
    part = torch.empty(end - first, right - left, dtype=tensor.dtype, device="cpu")
    read_rows(folder, OPTIMIZER + name, tensor, shard, None, part, left)
    return part


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
