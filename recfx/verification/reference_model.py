"""The model that a conversion is compared with: the original on its own copies of the converted model's tables."""

from __future__ import annotations

from typing import Any

from torch import nn

from recfx.collections.collection import unsharded_collections
from recfx.collections.copy_modules import copy_modules, copy_with_tensors, standard_collection
from recfx.collections.kinds import kind_of
from recfx.discovery.sample import clone_value
from recfx.optim.attached import attached_classes, attached_optimizers, run_in_backward
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import fused_optimizer_of
from recfx.verification.mapped_collection import map_collection


def reference_of(original: nn.Module, converted: nn.Module) -> nn.Module:
    """A copy of ``original`` whose hashed collections take the ids of ``converted``, over copies of its tables.

    Args:
        original: a model with standard collections.
        converted: its conversion; the collections have the same paths.
    """
    duplicate = copy_with_tensors(original)
    collections = unsharded_collections(duplicate).values()  # of a model that was converted in place
    standard = {id(each): standard_collection(each) for each in collections if len(each.hash_indexes)}
    if standard:
        duplicate, _ = copy_modules(duplicate, standard)
    for path, collection in unsharded_collections(converted).items():
        if len(collection.hash_indexes):
            map_collection(duplicate.get_submodule(path), collection)
    return duplicate


def attach_optimizers(source: nn.Module, duplicate: nn.Module, skip: set[str]) -> None:
    """Give the parameters of ``duplicate`` the optimizers in backward that are attached to those of ``source``.

    Copying a parameter loses them. Settings and state are copied; parameters named in ``skip`` are left alone.
    """
    parameters: dict[str, Any] = dict(duplicate.named_parameters())
    parameter: Any
    for name, parameter in source.named_parameters():
        optimizers = attached_optimizers(parameter)
        if not optimizers or name in skip:
            continue
        target = parameters[name]
        fused = fused_optimizer_of(parameter, name)
        if isinstance(fused, FusedOptimizer) and not hasattr(optimizers[0], "param_groups"):
            _attach_dense(fused, target)  # one of TorchRec's placeholders, whose step() only raises
            continue
        for optimizer_class, settings in attached_classes(parameter):
            run_in_backward(optimizer_class, target, dict(settings))
        for ours, theirs in zip(attached_optimizers(target), optimizers, strict=True):
            _copy_optimizer(theirs, ours, parameter, target)


def copy_fused_state(hashed: nn.Module, reference: nn.Module) -> None:
    """Give the optimizers in backward of ``reference`` the state of the fused ones of ``hashed``.

    Hashing a batch resets the state of rows that go to new ids, so the state of the original model would be wrong.
    """
    for path, collection in unsharded_collections(hashed).items():
        for table, fused in collection.fused_optimizers().items():
            weight: Any = reference.get_parameter(kind_of(collection).weight_name(path, table))
            for optimizer in attached_optimizers(weight):
                if fused.state and hasattr(optimizer, "state"):
                    optimizer.state[weight] = {key: clone_value(value) for key, value in fused.state.items()}


def _attach_dense(fused: FusedOptimizer, target: nn.Parameter) -> None:
    settings = {key: fused.group[key] for key in fused.rule.supported if key in fused.group}
    run_in_backward(fused.rule.dense_class, target, settings)
    (optimizer,) = attached_optimizers(target)
    optimizer.state[target].update({key: clone_value(value) for key, value in fused.state.items()})


def _copy_optimizer(source: Any, duplicate: Any, parameter: nn.Parameter, target: nn.Parameter) -> None:
    if not hasattr(source, "param_groups"):  # a placeholder that no rule stands for
        return
    for key, value in source.param_groups[0].items():
        if key != "params":
            duplicate.param_groups[0][key] = value
    state = {}
    for key, value in source.state.get(parameter, {}).items():
        state[key] = clone_value(value)
    if state:
        duplicate.state[target] = state
