"""The optimizers of a model, and what is saved of them: settings and state by parameter, whatever runs its step.

What an optimizer in backward has saved, fused or attached to a parameter, an ordinary one takes, and the other way
round. The state of a sharded table is stored as that of a whole one, of which each rank writes and reads its shards.
``optimizer=`` may be a ``torch.optim`` optimizer, also inside TorchRec's wrappers and beside fused ones.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from recfx.checkpoint.contents import OPTIMIZER, check_tensor
from recfx.checkpoint.storage import Parts
from recfx.checkpoint.tables import Table, tables_of
from recfx.collections.optimizer import FusedKeyedOptimizer
from recfx.errors import CheckpointError, type_of
from recfx.ir.tables import Shard
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules import RULES
from recfx.optim.rules.rule import STEP

AROUND_ONE = (KeyedOptimizerWrapper, WarmupOptimizer, GradientClippingOptimizer)
_FUSED = (FusedKeyedOptimizer, EmptyFusedOptimizer)
_ONE = (
    "pass one torch.optim optimizer, with a group of parameters for each that there was: "
    "Adam([{'params': a}, {'params': b, 'lr': 0.1}]). Fused optimizers are saved with the model, and so is a "
    "learning-rate scheduler that is the extra state of a module: see class Kept in recfx/checkpoint/README.md."
)


def unwrapped(optimizer: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The optimizer, and all optimizers inside it, from the outermost to the innermost, with their places."""
    yield place, optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for number, (_, inner) in enumerate(optimizer.optimizers):
            yield from unwrapped(inner, f"{place}.{number}" if place else f"{number}")
    elif type(optimizer) in AROUND_ONE:  # not in classes that users derived from them
        yield from unwrapped(optimizer._optimizer, f"{place}.inner" if place else "inner")


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The ``torch.optim`` optimizer inside; None if there are only fused ones, which are saved with the model."""
    around = (CombinedOptimizer, *_FUSED)
    inside = [] if optimizer is None else [inner for _, inner in unwrapped(optimizer) if type(inner) not in AROUND_ONE]
    ordinary = [inner for inner in inside if not isinstance(inner, around)]
    if len(ordinary) > 1:
        raise _not_supported(f"optimizer= has {len(ordinary)} optimizers that are not fused.", _ONE)
    for inner in ordinary:
        if isinstance(inner, torch.optim.Optimizer) and not isinstance(inner, KeyedOptimizer):
            return inner
        raise _not_supported(f"optimizer= is {type_of(inner)}, which is not supported.", _ONE)
    return None


def warm_ups(optimizer: object) -> dict[str, WarmupOptimizer]:
    """TorchRec's warm-ups, by their places."""
    return {place: part for place, part in unwrapped(optimizer) if isinstance(part, WarmupOptimizer)}


def _not_supported(message: str, what_to_do: str) -> CheckpointError:
    return CheckpointError(message, reason="optimizer_not_supported", what_to_do=what_to_do)


def settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a group of an optimizer, without what says which parameters it updates."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def kind_of_class(name: str) -> str:
    """The kind of an ordinary optimizer: the name of the rule that its class carries out, or of the class."""
    return next((rule.name for rule in RULES if rule.dense_class.__name__ == name), name)


def fused_tables(model: nn.Module) -> list[tuple[Table, FusedOptimizer]]:
    """The tables that have a fused optimizer."""
    return [(table, fused) for table in tables_of(model) if table.first and (fused := table.fused) is not None]


def attached_to(model: nn.Module) -> list[tuple[str, nn.Parameter, torch.optim.Optimizer]]:
    """The optimizers in backward without a fused form, with their parameters and the names of these (with a number if
    one has several); TorchRec's placeholders, which have no groups, are left out.
    """
    fused = {id(weight) for table, _ in fused_tables(model) for weight in table.weights}
    return [
        (f"{name}#{number}" if number else name, parameter, optimizer)
        for name, parameter in model.named_parameters()
        if id(parameter) not in fused
        for number, optimizer in enumerate(attached_optimizers(parameter))
        if getattr(optimizer, "param_groups", None)
    ]


class Stepped(NamedTuple):
    """A parameter that an optimizer updates; its name is ``""`` if the model lacks it."""

    parameter: Tensor
    name: str
    shard: tuple[Table, Shard] | None = None


def stepped_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Stepped]:
    """The parameters of all groups, in the order in which ``state_dict`` numbers them."""
    known = {id(parameter): Stepped(parameter, name) for name, parameter in model.named_parameters()}
    for table in tables_of(model):
        if table.first and table.module.is_sharded:
            for shard, weight in zip(table.here, table.weights, strict=True):
                known[id(weight)] = Stepped(weight, table.weight, (table, shard))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [known.get(id(parameter), Stepped(parameter, "")) for parameter in parameters]


def describe_in_backward(model: nn.Module, is_first: bool, written: dict[str, Any]) -> dict[str, Any]:
    """Add the tensors of the optimizers in backward that this rank saves to ``written``, and return all else by name.

    ``is_first``: whether this rank saves what is not sharded. ``blocks``: row-wise Adagrad has one state per block of
    columns; these are saved one after the other.
    """
    settings: dict[str, Any] = {}
    for table, fused in fused_tables(model):
        rule, blocks = fused.rule, table.placed.column_blocks
        entry: dict[str, Any] = {"kind": rule.name, "settings": settings_in(fused.group)}
        entry |= {"values": {}, "tensors": list(rule.tensor_names)}
        entry |= {"blocks": list(blocks)} if rule.has_row_state and len(blocks) > 1 else {}
        settings[table.weight] = entry
        for shard in table.saved_here if table.module.is_sharded or is_first else ():
            of_shard, name = table.fused_of(shard), f"{OPTIMIZER}{table.weight}."
            of_shard.prepare(table.module.store.weight(shard.name))  # before the first step, it may have no state
            for state in rule.states:
                value = of_shard.state[state.name].reshape(state.shape(shard.num_rows, shard.num_columns))
                _add_part(written, name + state.name, value, table, shard, state.per_row)
            if rule.counts_steps:
                _add_part(written, name + STEP, torch.as_tensor(of_shard.state[STEP]).reshape(()), table, shard)
    for name, parameter, optimizer in attached_to(model):
        settings[name] = {
            "kind": kind_of_class(type(optimizer).__name__),
            "settings": settings_in(optimizer.param_groups[0]),
            **_add_state(written, Stepped(parameter, name), optimizer.state[parameter], is_first),
        }
    return settings


def describe_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, is_first: bool, written: dict[str, Any]
) -> dict[str, Any]:
    """Add the tensors of an ordinary optimizer that this rank saves to ``written``, and return all else."""
    stepped = stepped_by(optimizer, model)
    if foreign := [number for number, one in enumerate(stepped) if not one.name]:
        raise _not_supported(
            f"optimizer= updates {len(foreign)} parameters that the model lacks; the first is its number {foreign[0]}.",
            "pass an optimizer of parameters of this model; save other optimizers with torch.save.",
        )
    known, whole = {id(one.parameter) for one in stepped}, optimizer.state
    # A warm-up keeps its state there for a parameter that is not the optimizer's, which has no number.
    optimizer.state = defaultdict(dict, {tensor: state for tensor, state in whole.items() if id(tensor) in known})
    try:
        saved = optimizer.state_dict()
    finally:
        optimizer.state = whole
    return {
        "kind": type(optimizer).__name__,
        "groups": [
            {**group, "params": [stepped[number].name for number in group["params"]]} for group in saved["param_groups"]
        ],
        "state": {
            stepped[number].name: _add_state(written, stepped[number], state, is_first)
            for number, state in saved["state"].items()
        },
    }


def _add_state(written: dict[str, Any], stepped: Stepped, state: Mapping[str, Any], is_first: bool) -> dict[str, Any]:
    """Add the tensors of a state, and return the rest, with their names."""
    tensors = {key: value.detach() for key, value in state.items() if isinstance(value, Tensor)}
    for key, tensor in tensors.items():
        name = f"{OPTIMIZER}{stepped.name}.{key}"
        if stepped.shard is not None:
            _add_part(written, name, tensor, *stepped.shard)
        elif is_first:
            check_tensor(name, tensor)
            written[name] = tensor
    return {"values": {key: value for key, value in state.items() if key not in tensors}, "tensors": list(tensors)}


def _add_part(
    written: dict[str, Any], name: str, value: Tensor, table: Table, shard: Shard, per_row: bool = False
) -> None:
    """Add a shard's part of a state that is one number, cut like the weight, or a number per row and column block."""
    rows, dim, shape = table.spec.num_embeddings, table.spec.embedding_dim, tuple(value.shape)
    per_row |= shape == (shard.num_rows, 1) and shard.num_columns == dim
    if shape == ():
        written.update({name: value.detach()} if shard == table.placed.saved[0] else {})
    elif not per_row and shape != (shard.num_rows, shard.num_columns):
        raise _not_supported(
            f"the state {name} of a sharded table is {shape}, its shard {(shard.num_rows, shard.num_columns)}.",
            "save such an optimizer with torch.distributed.checkpoint.",
        )
    elif shard in table.saved_here:
        size, begin = (rows, dim), (shard.rows[0], shard.columns[0])
        if per_row:
            size, begin = (len(table.placed.column_blocks) * rows, 1), (table.placed.stacked_row(shard), 0)
        written.setdefault(name, Parts(size)).put(begin, value)


def join_described(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join what the ranks say about their ordinary optimizers, which update shards of different tables."""
    if len({len(of_rank["groups"]) for of_rank in of_ranks}) > 1:
        what_to_do = "give it the same groups on all ranks."
        raise _not_supported("optimizer= does not have the same number of groups on all ranks.", what_to_do)
    groups = [
        {**same[0], "params": list(dict.fromkeys(name for group in same for name in group["params"]))}
        for same in zip(*(of_rank["groups"] for of_rank in of_ranks), strict=True)
    ]
    state = {name: entry for of_rank in reversed(of_ranks) for name, entry in of_rank["state"].items()}
    return {"kind": of_ranks[0]["kind"], "groups": groups, "state": state}
