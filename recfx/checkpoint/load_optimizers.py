"""Loads what was saved of optimizers: into fused ones by table, and into the ``state_dict`` of all others."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recfx.checkpoint.contents import OPTIMIZER, mismatch, refused_as
from recfx.checkpoint.optimizers import (
    AROUND_ONE,
    Stepped,
    kind_of_class,
    settings_in,
    unwrap_optimizer,
    unwrapped,
    warm_ups,
)
from recfx.checkpoint.storage import SavedFolder
from recfx.checkpoint.tables import Table, read_rows
from recfx.errors import CheckpointError, Diagnostic, Severity, few
from recfx.hashing.row_move import RowMove
from recfx.ir.tables import Shard
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules import rule_named
from recfx.optim.rules.rule import STEP

STEP_AS_SAVED = (
    "step it by the optimizer that stepped it when saving: attached with apply_optimizer_in_backward, which is carried "
    "out under every plan with sharders=recfx.sharders(), or in optimizer=; or load with in_backward=False and without "
    "optimizer=."
)


@dataclass(frozen=True)
class SavedOptimizer:
    """What was saved of the optimizer of one parameter."""

    name: str  # the name of the parameter, followed by ``#1`` and so on if it had several optimizers in backward
    kind: str  # the name of the optimizer's rule, or of its class if no rule stands for it
    settings: Mapping[str, Any]
    values: Mapping[str, Any]  # the part of its state that is no tensor
    names: Mapping[str, str]  # the names in the folder of the tensors of its state, by their names in the state
    folder: SavedFolder
    group: int | None = None  # the number of its group, if it was an ordinary optimizer; None if it was one in backward
    # the blocks of columns for each of which there is one number per row, if they were cut
    blocks: tuple[tuple[int, int], ...] = ()

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of one tensor of its state, as if columns had not been cut."""
        shape = tuple(self.folder.described[self.names[key]].shape)
        return (shape[0] // len(self.blocks), 1) if self._in_blocks(key) else shape

    def mismatch(self, message: str) -> CheckpointError:
        return mismatch(message, module_path=self.name, what_to_do=STEP_AS_SAVED)

    def check_kind(self, kind: str) -> None:
        """Refuse another kind of optimizer than was saved: it could not go on from this state."""
        if self.kind != kind:
            raise self.mismatch(f"the saved optimizer is {self.kind}, this one is {kind}.")

    def read(self, key: str, shard: Shard | None = None) -> Tensor:
        """One tensor of the state, whole, or a shard's part of it."""
        if shard is None or self.shape(key) == ():
            (saved,) = self.folder.read([self.names[key]]).values()
            return self._mean(list(saved.chunk(len(self.blocks)))) if self._in_blocks(key) else saved
        shape, rows, dim = self.shape(key), shard.table.num_embeddings, shard.table.embedding_dim
        if shape not in ((rows, dim), (rows, 1)):
            raise self.mismatch(f"the state {key!a} was saved as {shape}, but the table is {(rows, dim)}.")
        dtype, columns = self.folder.described[self.names[key]].dtype, shard.num_columns if shape[1] == dim else 1
        part = torch.empty(shard.num_rows, columns, dtype=dtype, device="cpu")
        self.read_shard(key, shard, None, part)
        return part

    def read_shard(self, key: str, shard: Shard, move: RowMove | None, target: Tensor) -> None:
        """Read a shard's part of one tensor of the state into ``target``, which has one column if there is one number
        per row; rows for which nothing was saved stay. ``move`` says where rows are now, if they are elsewhere.
        """
        (rows, columns), dim = self.shape(key), shard.table.embedding_dim

        def read(part: Tensor, row: int, column: int = 0) -> Tensor:
            read_rows(self.folder, self.names[key], shard, move, part, column, row)
            return part

        if not self._in_blocks(key):
            read(target, 0, shard.columns[0] if columns == dim else 0)
        elif shard.columns in self.blocks:
            read(target, self.blocks.index(shard.columns) * rows)
        else:
            target.copy_(self._mean([read(target.clone(), number * rows) for number in range(len(self.blocks))]))

    def _in_blocks(self, key: str) -> bool:
        return len(self.blocks) > 1 and self.folder.described[self.names[key]].shape[1:] == (1,)

    def _mean(self, parts: list[Tensor]) -> Tensor:
        """The mean over blocks of columns of one number per row, weighted by columns."""
        mean = torch.zeros_like(parts[0])
        for part, (left, right) in zip(parts, self.blocks, strict=True):
            mean += part * ((right - left) / self.blocks[-1][1])
        return mean


def saved_optimizers(settings: Mapping[str, Any], folder: SavedFolder) -> dict[str, SavedOptimizer]:
    """All optimizers of a checkpoint, by parameter. One in backward uses up the gradient, if a parameter had two."""
    entries: dict[str, SavedOptimizer] = {}

    def add(name: str, kind: str, of: Any, state: Mapping[str, Any], **more: Any) -> None:
        names = {key: f"{OPTIMIZER}{name}.{key}" for key in state.get("tensors", ())}
        entries[name] = SavedOptimizer(name, kind, settings_in(of), state.get("values", {}), names, folder, **more)

    ordinary = settings["optimizer"]
    for number, group in enumerate(ordinary["groups"] if ordinary else ()):
        for name in group["params"]:
            add(name, kind_of_class(ordinary["kind"]), group, ordinary["state"].get(name, {}), group=number)
    for name, entry in settings["in_backward"].items():
        add(name, entry["kind"], entry["settings"], entry, blocks=tuple(entry.get("blocks", ())))
    return entries


def plan_fused(
    table: Table, fused: FusedOptimizer, saved: SavedOptimizer | None, move: RowMove | None
) -> Callable[[], None]:
    """Check what was saved of a table's fused optimizer (None: it begins anew), and return what loads it on this rank.
    ``move`` says where the rows go, if the table has more rows than saved.
    """
    rule, names = fused.rule, {} if saved is None else saved.names
    if saved is not None:
        saved.check_kind(rule.name)
        if bool(saved.settings.get("weight_decay")) != bool(fused.group.get("weight_decay")):
            raise saved.mismatch("only one of the saved optimizer and this one has a weight_decay.")
        if unsupported := FusedOptimizer(rule, {**fused.group, **saved.settings}).changed_setting():
            raise saved.mismatch(f"it was saved with {unsupported}, which has no fused form.")
        rows = table.spec.num_embeddings if move is None else move.saved_rows
        for state in rule.states if names else ():
            shape = saved.shape(state.name) if state.name in names else "missing"
            if shape != state.shape(rows, table.spec.embedding_dim):
                raise saved.mismatch(f"its state {state.name!r} was saved as {shape}, which does not fit the table.")

    def load() -> None:
        steps = 0.0
        if saved is not None:
            steps = float(saved.read(STEP) if STEP in names else saved.values.get(STEP) or 0.0)
            fused.group.update(saved.settings)
        for shard in table.here:
            of_shard = table.fused_of(shard)
            for name in (state.name for state in rule.states):
                target = of_shard.state[name].detach()
                if move is not None or name not in names:
                    target.fill_(of_shard.start(name))
                if saved is not None and name in names:
                    saved.read_shard(name, shard, move, target)
            if rule.counts_steps:
                of_shard.state[STEP].fill_(steps)

    return load


def rebuild_state(
    optimizer: torch.optim.Optimizer,
    stepped: Sequence[Stepped],
    saved: Mapping[str, SavedOptimizer],
    groups: Sequence[Mapping[str, Any]],
    moves: Mapping[str, RowMove],
    in_backward: Collection[str] = (),
) -> tuple[dict[str, Any], list[Diagnostic]]:
    """The ``state_dict`` for ``optimizer``, which steps the parameters ``stepped``, and warnings about those that it
    steps with other settings than when saving. ``groups`` are those of the ordinary optimizer that was saved; ``moves``
    is of tables that have more rows now. What was saved of the parameters ``in_backward`` goes to other optimizers.
    """
    rebuilt: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    notes: list[Diagnostic] = []
    numbers = iter(range(len(stepped)))
    for position, group in enumerate(optimizer.param_groups):
        of_group = {number: stepped[number] for _, number in zip(group["params"], numbers, strict=False)}
        known = {number: saved[one.name] for number, one in of_group.items() if one.name in saved}
        taken = {number: entry for number, entry in known.items() if entry.name not in in_backward}
        # Parameters that were in one group have its settings; those that were all stepped in backward, the first one's.
        former = sorted({entry.group for entry in known.values() if entry.group is not None})
        if len(former) > 1:
            message = f"group {position} has parameters of groups {former} of the saved optimizer."
            raise mismatch(message, module_path="optimizer")
        if not group["params"] and position < len(groups):  # those of other ranks
            former = [position]
        settings = {key: group[key] for key in group if key in optimizer.defaults}  # some are not saved
        if former:
            settings |= settings_in(groups[former[0]])
        elif taken:
            of_backward = next(iter(taken.values())).settings
            settings |= {key: value for key, value in of_backward.items() if key in group}
        rebuilt.append({**settings, "params": list(of_group)})
        notes += _other_settings([entry for entry in taken.values() if entry.group is None], settings)
        for number, entry in taken.items():
            entry.check_kind(kind_of_class(type(optimizer).__name__))
            if entry.name in moves and entry.names:
                raise entry.mismatch(
                    "its state has one entry per row of its table, which has more rows now; only fused optimizers "
                    "follow them."
                )
            shard = of_group[number].shard
            tensors = {key: entry.read(key, None if shard is None else shard[1]) for key in entry.names}
            if entry.values or tensors:
                state[number] = {**entry.values, **tensors}
    return {"state": state, "param_groups": rebuilt}, notes


_HARMLESS = {"foreach", "fused", "capturable", "differentiable", "initial_accumulator_value"}


def _other_settings(entries: Collection[SavedOptimizer], settings: Mapping[str, Any]) -> list[Diagnostic]:
    """The warning about parameters that were stepped in backward, with settings that their group does not have."""
    changed: dict[str, set[str]] = {}
    for entry in entries:
        rule = rule_named(entry.kind)
        former = {**dict.fromkeys(() if rule is None else rule.refused, 0), **entry.settings}
        both = former.keys() & settings.keys() - _HARMLESS
        changed[entry.name] = {key for key in both if _plain(former[key]) != _plain(settings[key])}
    names = [name for name, keys in changed.items() if keys]
    if not names:
        return []
    keys = ", ".join(sorted(set.union(*changed.values())))
    return [
        warning(
            code="optimizer_settings_differ",
            message=f"{few(names, 3)} was stepped in backward with another {keys}, and has its group's settings now.",
            what_to_do="give it a group of its own in optimizer=, or shard with sharders=recfx.sharders(), which carry "
            "out optimizers in backward under every plan.",
        )
    ]


def _plain(setting: Any) -> Any:
    if isinstance(setting, Tensor):
        return setting.tolist()
    return tuple(setting) if isinstance(setting, list) else setting


def warning(code: str, message: str, what_to_do: str) -> Diagnostic:
    """What the user should know about the optimizers that were loaded."""
    return Diagnostic(code, "optimizer", message, what_to_do, Severity.WARNING)


def load_state(optimizer: Any, state: dict[str, Any], undo: contextlib.ExitStack) -> None:
    """``load_state_dict`` of the optimizer inside; ``undo`` gets what undoes it."""
    inner: Any = unwrap_optimizer(optimizer)
    wrappers = [wrapper for _, wrapper in unwrapped(optimizer) if type(wrapper) in AROUND_ONE]
    for part in (inner, *wrappers):
        undo.callback(_set, part, part.state, part.param_groups)
    with refused_as("the optimizer", "optimizer"):
        inner.load_state_dict(state)
    for wrapper in reversed(wrappers):  # torch has replaced the objects that they know
        _set(wrapper, wrapper._optimizer.state, wrapper._optimizer.param_groups)


def _set(optimizer: Any, state: Any, groups: Any) -> None:
    optimizer.state, optimizer.param_groups = state, groups


def plan_warm_ups(optimizer: object, saved: Mapping[str, list[int]]) -> Callable[[], None]:
    """A function that sets the saved states of warm-ups (number of steps, and of the stage), and learning rates."""
    here = warm_ups(optimizer)
    if here.keys() != saved.keys() or any(saved[place][1] >= len(here[place]._stages) for place in here):
        message = f"warm-ups were saved at {dict(saved)} of optimizer=; here they are at {sorted(here)}, or shorter."
        raise mismatch(message, module_path="optimizer")

    def load() -> None:
        for place, warm_up in reversed(here.items()):  # the outermost has the last word, as when they step
            state = torch.tensor(saved[place], dtype=torch.long, device="cpu")
            warm_up.state[warm_up._warmup_param] = {"warmup": state}
            warm_up._set_lr(*saved[place])

    return load
