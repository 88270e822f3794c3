"""Loads what was saved of optimizers: into fused ones by table, and into the ``state_dict`` of all others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recfx.checkpoint.optimizers import SavedOptimizer, SavedOptimizers, Stepped, kind_of_class, settings_in
from recfx.checkpoint.tables import Table
from recfx.checkpoint.wrapped_optimizers import other_optimizer
from recfx.errors import Diagnostic, Severity, few
from recfx.hashing.row_move import RowMove
from recfx.ir.tables import Shard
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules import rule_named
from recfx.optim.rules.rule import STEP


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
    saved: SavedOptimizers,
    moves: Mapping[str, RowMove],
    in_backward: Collection[str] = (),
) -> tuple[dict[str, Any], list[Diagnostic]]:
    """The ``state_dict`` for ``optimizer``, which steps the parameters ``stepped``, and warnings about those that it
    steps with other settings than when saving. Changes nothing.

    ``moves`` has the tables that have more rows than saved, by weight name. An optimizer in backward steps the
    parameters ``in_backward`` here, and takes what was saved of them.
    """
    rebuilt: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    notes: list[Diagnostic] = []
    numbers = iter(range(len(stepped)))
    for position, group in enumerate(optimizer.param_groups):
        of_group = {number: stepped[number] for _, number in zip(group["params"], numbers, strict=False)}
        known = {number: saved.entries[one.name] for number, one in of_group.items() if one.name in saved.entries}
        taken = {number: entry for number, entry in known.items() if entry.name not in in_backward}
        # Parameters that were in one group have its settings; those that were all stepped in backward, the first one's.
        groups = sorted({entry.group for entry in known.values() if entry.group is not None})
        if len(groups) > 1:
            raise other_optimizer(f"group {position} has parameters of groups {groups} of the saved optimizer.")
        if not group["params"] and position < len(saved.groups):  # those of other ranks
            groups = [position]
        settings = {key: group[key] for key in group if key in optimizer.defaults}  # some are not saved
        if groups:
            settings |= settings_in(saved.groups[groups[0]])
        elif taken:
            former = next(iter(taken.values())).settings
            settings |= {key: value for key, value in former.items() if key in group}
        rebuilt.append({**settings, "params": list(of_group)})
        notes += _other_settings(taken.values(), settings)
        for number, entry in taken.items():
            if of_parameter := _read_state(of_group[number], entry, optimizer, moves):
                state[number] = of_parameter
    return {"state": state, "param_groups": rebuilt}, notes


_HARMLESS = ("foreach", "fused", "capturable", "differentiable", "initial_accumulator_value")


def _other_settings(entries: Collection[SavedOptimizer], settings: Mapping[str, Any]) -> list[Diagnostic]:
    """Warnings about parameters that were stepped in backward, with settings that their group does not have."""
    stepped: dict[str, list[str]] = {}
    for entry in entries:
        rule = rule_named(entry.kind)
        former = {**dict.fromkeys(() if rule is None else rule.refused, 0), **entry.settings}
        changed = [
            f"{key}={former[key]!r} (here {settings[key]!r})"
            for key in sorted(former.keys() & settings.keys() - {*_HARMLESS})
            if _plain(former[key]) != _plain(settings[key])
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
    stepped: Stepped, saved: SavedOptimizer, optimizer: torch.optim.Optimizer, moves: Mapping[str, RowMove]
) -> dict[str, Any]:
    """The state of one parameter; for a shard, its part of it."""
    saved.check_kind(kind_of_class(type(optimizer).__name__))
    if saved.name in moves and saved.names:
        raise saved.mismatch(
            "its state has one entry per row of its table, which has more rows now; only fused optimizers follow them."
        )
    rule, parameter = rule_named(saved.kind), stepped.parameter
    if rule is not None and parameter.dim() == 2 and saved.group is None and not saved.names:
        # The state before the first step, which some optimizers make only when they are built.
        state = {
            spec.name: torch.full(spec.shape(*parameter.shape), rule.start(spec.name, saved.settings), device="cpu")
            for spec in rule.states
        }
        return {**state, STEP: torch.zeros((), device="cpu")} if rule.counts_steps else state
    shard = None if stepped.shard is None else stepped.shard[1]
    tensors = {key: saved.read(key) if shard is None else _read_part(saved, key, shard) for key in saved.names}
    return {**saved.values, **tensors}


def _read_part(saved: SavedOptimizer, key: str, shard: Shard) -> Tensor:
    described, rows, dim = saved.described(key), shard.table.num_embeddings, shard.table.embedding_dim
    if described.dim() == 0:
        return saved.read(key)
    if saved.shape(key) not in ((rows, dim), (rows, 1)):
        raise saved.mismatch(
            f"the state {key!a} was saved as {tuple(described.shape)}, but the table is {(rows, dim)}."
        )
    columns = shard.num_columns if described.shape[1] == dim else described.shape[1]
    part = torch.empty(shard.num_rows, columns, dtype=described.dtype, device="cpu")
    saved.read_shard(key, shard, None, part)
    return part
