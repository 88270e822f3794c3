"""What is saved of optimizers: those in backward, fused or attached to a parameter, and the ordinary one.

State has the names of parameters, not their numbers. The optimizer of a sharded table is described as if the table were
whole; each rank saves the state of its own shards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recfx.checkpoint.contents import OPTIMIZER
from recfx.checkpoint.saved_optimizers import kind_of_class, settings_in
from recfx.checkpoint.storage import Parts
from recfx.checkpoint.tables import Table, tables_of
from recfx.checkpoint.wrapped_optimizers import not_supported
from recfx.ir.tables import Shard
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules.rule import STEP

Written = dict[str, Tensor | Parts]


class AttachedOptimizer(NamedTuple):
    """An optimizer in backward without a fused form; the name is that of its parameter, with a number if it has two."""

    name: str
    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer


def fused_tables(model: nn.Module) -> list[tuple[Table, FusedOptimizer]]:
    """The tables that have a fused optimizer."""
    return [(table, fused) for table in tables_of(model) if table.first and (fused := table.fused) is not None]


def attached_to(model: nn.Module) -> list[AttachedOptimizer]:
    """The optimizers in backward that are not fused; TorchRec's placeholders, which have no groups, are left out."""
    fused = {id(weight) for table, _ in fused_tables(model) for weight in table.weights}
    return [
        AttachedOptimizer(f"{name}#{number}" if number else name, parameter, optimizer)
        for name, parameter in model.named_parameters()
        if id(parameter) not in fused
        for number, optimizer in enumerate(attached_optimizers(parameter))
        if getattr(optimizer, "param_groups", None)
    ]


def describe_in_backward(model: nn.Module, is_first: bool) -> tuple[dict[str, Any], dict[str, Tensor], Written]:
    """Optimizers in backward: all but tensors; the tensors of attached ones; and this rank's parts of those of tables.

    ``blocks``: row-wise Adagrad has one state per block of columns; these are saved one after the other. ``is_first``
    is whether this rank saves what is not sharded.
    """
    described: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    parts: Written = {}
    for table, fused in fused_tables(model):
        names = list(fused.rule.tensor_names)
        if not table.module.is_sharded:  # it has no state before its first step
            names = [name for name in names if name in table.fused_of(table.shards[0]).state]
        entry: dict[str, Any] = {
            "kind": fused.rule.name,
            "settings": settings_in(fused.group),
            "values": {},
            "tensors": names,
        }
        if fused.rule.has_row_state and len(table.column_blocks) > 1:
            entry["blocks"] = list(table.column_blocks)
        described[table.weight] = entry
        if table.module.is_sharded or is_first:
            parts.update(_parts_of_state(table, fused, names))
    for name, parameter, optimizer in attached_to(model):
        values, of_state = _apart(optimizer.state[parameter])
        tensors.update({f"{OPTIMIZER}{name}.{key}": value for key, value in of_state.items()})
        described[name] = {
            "kind": kind_of_class(type(optimizer).__name__),
            "settings": settings_in(optimizer.param_groups[0]),
            "values": values,
            "tensors": list(of_state),
        }
    return described, tensors, parts


def _apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The values and the tensors of a state."""
    tensors = {key: value.detach() for key, value in state.items() if isinstance(value, Tensor)}
    return {key: value for key, value in state.items() if key not in tensors}, tensors


def _parts_of_state(table: Table, fused: FusedOptimizer, names: list[str]) -> Written:
    """This rank's parts of a fused state, which is cut like the weight, or has a number per row and column block."""
    rows, start, written = table.spec.num_embeddings, f"{OPTIMIZER}{table.weight}.", Written()
    for declared in fused.rule.states:
        if declared.name not in names:
            continue
        blocks = table.column_blocks if declared.per_row else ()
        parts = Parts((len(blocks) * rows, 1) if blocks else (rows, table.spec.embedding_dim))
        for shard in table.saved_here:
            state: Tensor = table.fused_of(shard).state[declared.name]
            row, column = shard.rows[0], shard.columns[0]
            if blocks:
                row, column = blocks.index(shard.columns) * rows + row, 0
            parts.put((row, column), state.reshape(state.shape[0], math.prod(state.shape[1:])))
        written[start + declared.name] = parts
    if STEP in names and table.saved[0].rank == table.rank:
        written[start + STEP] = torch.as_tensor(table.fused_of(table.saved[0]).state[STEP]).detach().reshape(())
    return written


class Stepped(NamedTuple):
    """A parameter that an optimizer updates; its name is ``#<number>`` if the model lacks it."""

    parameter: Tensor
    name: str
    shard: tuple[Table, Shard] | None


def stepped_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Stepped]:
    """The parameters of all groups, in the order in which ``state_dict`` numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    sharded = {
        id(weight): (table, shard)
        for table in tables_of(model)
        if table.first and table.module.is_sharded
        for shard, weight in zip(table.here, table.weights, strict=True)
    }
    stepped = []
    for number, parameter in enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]):
        shard = sharded.get(id(parameter))
        name = names.get(id(parameter), f"#{number}") if shard is None else shard[0].weight
        stepped.append(Stepped(parameter, name, shard))
    return stepped


def describe_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Any], dict[str, Tensor], Written]:
    """An ordinary optimizer: all but tensors; the tensors; and this rank's parts of those of sharded tables.

    Raises:
        CheckpointError: ``optimizer_not_supported``: it steps parameters that are not in ``model``, or has a state of
            a sharded table that is not cut as the table is.
    """
    stepped = stepped_by(optimizer, model)
    foreign = [number for number, parameter in enumerate(stepped) if parameter.name == f"#{number}"]
    if foreign:
        raise not_supported(
            f"optimizer= updates {len(foreign)} parameters that the model lacks; the first is its number {foreign[0]}.",
            "pass an optimizer of parameters of this model; save other optimizers with torch.save.",
        )
    saved = _state_dict(optimizer)
    whole: dict[str, Tensor] = {}
    parts: Written = {}
    states: dict[str, dict[str, Any]] = {}
    for number, state in saved["state"].items():
        _, name, shard = stepped[number]
        values, tensors = _apart(state)
        states[name] = {"values": values, "tensors": list(tensors)}
        for key, tensor in tensors.items():
            if shard is None:
                whole[f"{OPTIMIZER}{name}.{key}"] = tensor
            else:
                _add_part(parts, f"{OPTIMIZER}{name}.{key}", tensor, *shard)
    groups = [
        {**group, "params": [stepped[number].name for number in group["params"]]} for group in saved["param_groups"]
    ]
    return {"kind": type(optimizer).__name__, "groups": groups, "state": states}, whole, parts


def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state without a warm-up's, which it keeps for a parameter that is not the optimizer's: it has no number."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    whole = optimizer.state
    optimizer.state = defaultdict(dict, {tensor: state for tensor, state in whole.items() if id(tensor) in stepped})
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = whole


def _add_part(written: Written, name: str, value: Tensor, table: Table, shard: Shard) -> None:
    """Put a shard's part of a state among those that this rank saves."""
    rows, dim = table.spec.num_embeddings, table.spec.embedding_dim
    shape = tuple(value.shape)
    per_row = shape == (shard.num_rows, 1) and shard.num_columns == dim
    if shape not in ((), (shard.num_rows, shard.num_columns)) and not per_row:
        raise not_supported(
            f"the state {name} of a sharded table is {shape}, its shard {(shard.num_rows, shard.num_columns)}.",
            "save such an optimizer with torch.distributed.checkpoint.",
        )
    if shape == () and shard == table.saved[0]:
        written[name] = value
    elif shape != () and shard in table.saved_here:
        parts = written.setdefault(name, Parts((rows, 1 if per_row else dim)))
        assert isinstance(parts, Parts)
        parts.put((shard.rows[0], 0 if per_row else shard.columns[0]), value)


def join_described(described: list[dict[str, Any]]) -> dict[str, Any]:
    """Join what the ranks say about their ordinary optimizers, which update shards of different tables.

    Raises:
        CheckpointError: ``optimizer_not_supported``: they have different numbers of groups.
    """
    first = described[0]
    if any(len(of_rank["groups"]) != len(first["groups"]) for of_rank in described):
        raise not_supported(
            "optimizer= does not have the same number of groups on all ranks.", "give it the same groups on all ranks."
        )
    groups = [dict(group) for group in first["groups"]]
    for number, group in enumerate(groups):
        group["params"] = list(dict.fromkeys(name for rank in described for name in rank["groups"][number]["params"]))
    state = {name: entry for of_rank in reversed(described) for name, entry in of_rank["state"].items()}
    return {"kind": first["kind"], "groups": groups, "state": state}
