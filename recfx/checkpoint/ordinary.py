"""An ordinary ``torch.optim`` optimizer in a checkpoint: its state by the names of parameters, not their numbers.

It may be inside TorchRec's wrappers, of which a warm-up has a state of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from recfx.checkpoint.contents import OPTIMIZER, mismatch
from recfx.checkpoint.saved_optimizers import SavedOptimizer, SavedOptimizers, kind_of_class, settings_in
from recfx.checkpoint.storage import Parts, SavedFolder
from recfx.checkpoint.tables import Table, sharded_parameters
from recfx.collections.sharding.optimizer import ShardedFusedOptimizer
from recfx.errors import CheckpointError, Diagnostic, Severity, few, type_of
from recfx.hashing.row_move import RowMove
from recfx.ir.tables import Shard
from recfx.optim.keyed_optimizer import FusedKeyedOptimizer
from recfx.optim.rules import rule_named
from recfx.optim.rules.rule import STEP, Rule

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
        raise other_optimizer(
            f"warm-ups were saved at {sorted(saved)} of optimizer=, here they are at {sorted(warm_ups)}."
        )
    for place, warm_up in warm_ups.items():
        stage, stages = saved[place][1], len(warm_up._stages)
        if stage >= stages:
            raise other_optimizer(f"a warm-up was saved in its stage {stage}, but here it has {stages}.")
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


def other_optimizer(
    message: str, what_to_do: str = "build the optimizer as it was built when saving, or load without optimizer=."
) -> CheckpointError:
    """The error for an optimizer that is not the one that was saved."""
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


class Stepped(NamedTuple):
    """A parameter that an optimizer updates; its name is ``#<number>`` if the model lacks it."""

    parameter: Tensor
    name: str
    shard: tuple[Table, Shard] | None


def stepped_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Stepped]:
    """The parameters of all groups, in the order in which ``state_dict`` numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    sharded = sharded_parameters(model)
    stepped = []
    for number, parameter in enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]):
        shard = sharded.get(id(parameter))
        name = names.get(id(parameter), f"#{number}") if shard is None else shard[0].weight
        stepped.append(Stepped(parameter, name, shard))
    return stepped


def describe_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor | Parts]]:
    """What ``optimizer.state_dict()`` says: all but tensors; the tensors, by the names under which they are saved; and
    this rank's parts of those of sharded tables.

    Raises:
        CheckpointError: ``optimizer_not_supported``: it steps parameters that are not in ``model``, or has a state of
            a sharded table that is not cut as the table is.
    """
    stepped = stepped_by(optimizer, model)
    foreign = [number for number, parameter in enumerate(stepped) if parameter.name == f"#{number}"]
    if foreign:
        raise _not_supported(
            f"optimizer= updates {len(foreign)} parameters that the model lacks; the first is its number {foreign[0]}.",
            "pass an optimizer of parameters of this model; save other optimizers with torch.save.",
        )
    saved = _state_dict(optimizer)
    whole: dict[str, Tensor] = {}
    parts: dict[str, Tensor | Parts] = {}
    values: dict[str, dict[str, Any]] = {}
    for number, state in saved["state"].items():
        _, name, shard = stepped[number]
        tensors = {key: value.detach() for key, value in state.items() if isinstance(value, Tensor)}
        rest = {key: value for key, value in state.items() if key not in tensors}
        values[name] = {"values": rest, "tensors": list(tensors)}
        for key, tensor in tensors.items():
            if shard is None:
                whole[f"{OPTIMIZER}{name}.{key}"] = tensor
            else:
                _add_part(parts, f"{OPTIMIZER}{name}.{key}", tensor, *shard)
    groups = [
        {**group, "params": [stepped[number].name for number in group["params"]]} for group in saved["param_groups"]
    ]
    return {"kind": type(optimizer).__name__, "groups": groups, "state": values}, whole, parts


def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state without a warm-up's, which it keeps for a parameter that is not the optimizer's: it has no number."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    whole = optimizer.state
    optimizer.state = defaultdict(dict, {tensor: state for tensor, state in whole.items() if id(tensor) in stepped})
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = whole


def _add_part(tensors: dict[str, Tensor | Parts], name: str, value: Tensor, table: Table, shard: Shard) -> None:
    size = whole_state_size(name, tuple(value.shape), table, shard)
    if shard not in table.saved_here:
        return
    if size == ():
        if table.saved[0] == shard:
            tensors[name] = value
        return
    parts = tensors.setdefault(name, Parts(size))
    assert isinstance(parts, Parts)
    parts.put((shard.rows[0], shard.columns[0] if size[1] > 1 else 0), value)


def whole_state_size(name: str, part: tuple[int, ...], table: Table, shard: Shard) -> tuple[int, ...]:
    """The size of the state of a whole table, of which a shard has a part.

    Raises:
        CheckpointError: ``optimizer_not_supported``.
    """
    (first, end), (left, right), spec = shard.rows, shard.columns, table.spec
    if part == (end - first, right - left):
        return spec.num_embeddings, spec.embedding_dim
    if part == (end - first, 1) and right - left == spec.embedding_dim:
        return spec.num_embeddings, 1
    if part == ():
        return ()
    raise _not_supported(f"the state {name} of a sharded table is {part}, its shard {(end - first, right - left)}.")


def join_described(described: list[dict[str, Any]]) -> dict[str, Any]:
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
    groups = [
        {
            **group,
            "params": list(dict.fromkeys(name for rank in described for name in rank["groups"][number]["params"])),
        }
        for number, group in enumerate(first["groups"])
    ]
    return {"kind": first["kind"], "groups": groups, "state": state}


def rebuild_state(
    optimizer: torch.optim.Optimizer,
    stepped: Sequence[Stepped],
    folder: SavedFolder,
    saved: SavedOptimizers,
    moves: Mapping[str, RowMove],
    in_backward: Collection[str] = (),
) -> tuple[dict[str, Any], list[Diagnostic]]:
    """The ``state_dict`` for ``optimizer``. Changes nothing.

    Args:
        optimizer: the optimizer that is to load the state.
        stepped: its parameters, as ``stepped_by`` returns them.
        folder: the data folder.
        saved: the optimizers that were saved.
        moves: the moves of tables that have more rows than saved, by weight name.
        in_backward: the parameters that an optimizer in backward steps here, which takes what was saved of them.

    Returns:
        the ``state_dict``; and warnings about parameters that it steps with other settings than when saving.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    numbers = iter(range(len(stepped)))
    rebuilt: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    notes: list[Diagnostic] = []
    for position, group in enumerate(optimizer.param_groups):
        group_numbers = [next(numbers) for _ in group["params"]]
        names = {number: stepped[number].name for number in group_numbers}
        entries = {
            number: saved.entries[name]
            for number, name in names.items()
            if name in saved.entries and name not in in_backward
        }
        settings = _settings_of(optimizer, position, list(names.values()), list(entries.values()), saved)
        rebuilt.append({**settings, "params": group_numbers})
        notes += _other_settings(entries.values(), settings)
        for number, entry in entries.items():
            if of_parameter := _read_state(folder, stepped[number], entry, optimizer, moves):
                state[number] = of_parameter
    return {"state": state, "param_groups": rebuilt}, notes


def _settings_of(
    optimizer: torch.optim.Optimizer,
    position: int,
    names: Collection[str],
    entries: Sequence[SavedOptimizer],
    saved: SavedOptimizers,
) -> dict[str, Any]:
    """The settings of one group: those of the group that its parameters were in. A group of parameters that were all
    stepped in backward has the settings of the first.

    Raises:
        CheckpointError: ``checkpoint_mismatch``: the parameters were in several groups.
    """
    group = optimizer.param_groups[position]
    then_in_backward = {entry.name for entry in entries if entry.group is None}
    of_names = [saved.group_of(name) for name in names if name not in then_in_backward]
    groups = sorted({number for number in of_names if number is not None})
    if len(groups) > 1:
        raise other_optimizer(f"group {position} has parameters of groups {groups} of the saved optimizer.")
    if not names and position < len(saved.groups):  # those of other ranks
        groups = [position]
    known = settings_in(saved.groups[groups[0]]) if groups else {}
    if not groups and entries:
        known = {key: value for key, value in entries[0].settings.items() if key in group}
    return {**{key: value for key, value in group.items() if key in optimizer.defaults}, **known}  # some are not saved


_HARMLESS = ("foreach", "fused", "capturable", "differentiable", "initial_accumulator_value")


def _other_settings(entries: Collection[SavedOptimizer], settings: Mapping[str, Any]) -> list[Diagnostic]:
    """What is said of parameters that were stepped in backward, with settings that their group does not have."""
    stepped: dict[str, list[str]] = {}
    for entry in entries:
        rule = rule_named(entry.kind)
        former = {**dict.fromkeys(() if rule is None else rule.refused, 0), **entry.settings}
        changed = [
            f"{key}={former[key]!r} (here {settings[key]!r})"
            for key in sorted(former.keys() & settings.keys())
            if key not in _HARMLESS and _plain(former[key]) != _plain(settings[key])
        ]
        if changed and entry.group is None:
            stepped.setdefault(", ".join(changed), []).append(entry.name)
    what_to_do = (
        "give them a group of their own in optimizer=, or shard with sharders=recfx.sharders(), which carry out "
        "optimizers in backward under every plan."
    )
    return [
        Diagnostic(
            "optimizer_settings_differ",
            "optimizer",
            f"{few(names, 3)} was stepped in backward with {changed}, and has the settings of its group now.",
            what_to_do,
            Severity.WARNING,
        )
        for changed, names in stepped.items()
    ]


def _plain(setting: Any) -> Any:
    if isinstance(setting, Tensor):
        return setting.tolist()
    return tuple(setting) if isinstance(setting, list) else setting


def _read_state(
    folder: SavedFolder,
    stepped: Stepped,
    saved: SavedOptimizer,
    optimizer: torch.optim.Optimizer,
    moves: Mapping[str, RowMove],
) -> dict[str, Any]:
    """The state of one parameter; for a shard, its part of it."""
    saved.check_kind(kind_of_class(type(optimizer).__name__))
    if saved.name in moves and saved.tensors:
        raise saved.mismatch(
            "its state has one entry per row of its table, which has more rows now; only fused optimizers follow them."
        )
    rule, parameter = rule_named(saved.kind), stepped.parameter
    if rule is not None and parameter.dim() == 2 and saved.group is None and not saved.tensors:
        return _started(rule, parameter, saved.settings)
    if stepped.shard is None:
        return {**saved.values, **{key: saved.read(folder, key) for key in saved.tensors}}
    return {**saved.values, **{key: _read_part(folder, saved, key, stepped.shard[1]) for key in saved.tensors}}


def _started(rule: Rule, parameter: Tensor, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state before the first step, which some optimizers make only when they are built."""
    state = {
        spec.name: torch.full(spec.shape(*parameter.shape), rule.start(spec.name, settings), device="cpu")
        for spec in rule.states
    }
    return {**state, STEP: torch.zeros((), device="cpu")} if rule.counts_steps else state


def _read_part(folder: SavedFolder, saved: SavedOptimizer, key: str, shard: Shard) -> Tensor:
    tensor, rows, dim = saved.tensors[key], shard.table.num_embeddings, shard.table.embedding_dim
    if tensor.dim() == 0:
        return saved.read(folder, key)
    if saved.shape(key) not in ((rows, dim), (rows, 1)):
        raise saved.mismatch(f"the state {key!a} was saved as {tuple(tensor.shape)}, but the table is {(rows, dim)}.")
    columns = shard.num_columns if tensor.shape[1] == dim else tensor.shape[1]
    part = torch.empty(shard.num_rows, columns, dtype=tensor.dtype, device="cpu")
    saved.read_shard(folder, key, shard, None, part)
    return part
