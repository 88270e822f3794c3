"""One forward, backward and optimizer step of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import CollectionKind, kind_of, standard_kind
from recfx.discovery.sample import Sample, fixed_randomness, tensors_of
from recfx.runtime import SelectFeatures
from recfx.runtime.training_checks import on_a_copy

COMPARED = ("outputs", "gradients", "parameters", "buffers")
"""The parts of two runs that are compared, in this order."""


@dataclass
class Run:
    """The result of one step.

    Args:
        outputs: the model's output tensors, by position.
        gradients: gradients of parameters and of inputs that require them.
        parameters: parameters after the step.
        buffers: buffers after the step; those of the indexes are not compared.
        pooled: output of every collection, by path and key.
        touched: rows that the batch used, by parameter name; only for standard collections.
        calls: how often the forward called each collection, by path.
        originals: paths of the collections whose original the forward called instead of the copy; if there are any,
            nothing else was run.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    pooled: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    touched: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    originals: set[str] = field(default_factory=set)


@contextlib.contextmanager
def counted_calls(model: nn.Module, originals: Mapping[str, nn.Module], run: Run) -> Iterator[None]:
    """Count the calls of collections by what runs inside them: ``forward`` may be called without their hooks."""
    watched = {id(module): (path, module) for path, module in originals.items()}
    watched |= {id(module): (path, module) for path, module in model.named_modules()}
    own = {id(module) for module in model.modules()}
    handles = []
    for key, (path, module) in watched.items():
        if isinstance(module, UnshardedCollection):
            module.fused_optimizers()  # a newly attached one makes a new graph, which the hook must see
            parts: list[nn.Module] = [
                part for part in module.graph_module.modules() if isinstance(part, SelectFeatures)
            ]
            hook = partial(_note_call, run, path, key in own)
        elif (kind := standard_kind(module)) is not None and len(kind.tables_of(module)):
            parts = [next(iter(kind.tables_of(module).values()))]
            features = len(kind.configs_of(module)[0].feature_names)
            hook = partial(_note_table_call, run, path, key in own, [0], features, kind.call_arguments)
        else:
            continue
        run.calls.setdefault(path, 0)
        handles += [part.register_forward_pre_hook(hook, with_kwargs=True) for part in parts[:1]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_call(run: Run, path: str, own: bool, part: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
    run.calls[path] += 1
    if not own:
        run.originals.add(path)


def _note_table_call(
    run: Run,
    path: str,
    own: bool,
    seen: list[int],
    features: int,
    arguments: frozenset[str],
    table: nn.Module,
    inputs: Any,
    named: dict[str, Any],
) -> None:
    """Count calls that the standard forward makes: it calls a table once per feature, and names all ``arguments``.

    The user's own code may also call the table, but is unlikely to name all of them.
    """
    if not inputs and named.keys() == arguments:
        seen[0] += 1
        if seen[0] % features == 0:
            _note_call(run, path, own, table, inputs, named)


@contextlib.contextmanager
def noted_lookups(model: nn.Module, run: Run) -> Iterator[None]:
    """Record in ``run`` what every collection pools, and which rows standard ones read."""
    handles: list[Any] = []
    for path, module in model.named_modules():
        converted, kind = isinstance(module, ConvertedCollection), standard_kind(module)
        if isinstance(module, UnshardedCollection) or (kind is not None and not converted):
            # Before the hooks of the user, which may return something else.
            handles.append(
                module.register_forward_hook(partial(_note_outputs, run, path, kind_of(module)), prepend=True)
            )
        # A converted subclass is an instance of both.
        if kind is not None and not converted:
            for table, bag in kind.tables_of(module).items():
                hook = partial(_note_rows, run, kind.weight_name(path, table))
                handles.append(bag.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_outputs(run: Run, path: str, kind: CollectionKind, module: nn.Module, inputs: Any, output: Any) -> None:
    for key, value in kind.values_of(output).items():
        run.pooled[path, key] = value.detach().clone()


def _note_rows(run: Run, name: str, table: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
    rows = (named["input"] if "input" in named else inputs[0]).detach().to(torch.int64)
    seen = run.touched.get(name)
    run.touched[name] = torch.unique(rows if seen is None else torch.cat([seen, rows]))


LEARNING_RATE = 0.1
_REMAPS = "_managed_collision_collection."  # what it holds is in the indexes of a converted collection


def run_step(
    model: nn.Module, call: Sample, training: bool, originals: Mapping[str, nn.Module] = MappingProxyType({})
) -> Run:
    """Run one step of ``model``, a copy: the step changes it, and the result holds its tensors. The loss is a fixed
    random combination of all outputs. Parameters that still have a gradient after the backward (because no optimizer in
    backward took it) take an SGD step. If the copy still calls one of ``originals``, collections of the model that it
    is a copy of, no backward is run, because it would leave gradients in the user's model.
    """
    run = Run()
    model.train(training)
    call = call.clone()
    with fixed_randomness(), on_a_copy(), noted_lookups(model, run):
        with counted_calls(model, originals, run):
            outputs = tensors_of(model(*call.args, **call.kwargs))
        for position, output in enumerate(outputs):
            run.outputs[str(position)] = output.detach().clone()
        if run.originals:
            return run
        generator = torch.Generator().manual_seed(1)
        loss: Any = 0.0
        for output in outputs:
            if output.requires_grad:
                weights = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
                loss = loss + (output * weights).sum() / max(1, output.shape[0] if output.dim() else 1)
        if isinstance(loss, torch.Tensor):
            loss.backward()
    for position, tensor in enumerate(tensors_of((call.args, call.kwargs))):
        if tensor.grad is not None:
            run.gradients[f"input {position}"] = tensor.grad.clone()
    for name, parameter in model.named_parameters():
        if _REMAPS in name:
            continue
        if parameter.grad is not None:
            run.gradients[name] = parameter.grad
            parameter.data.add_(parameter.grad, alpha=-LEARNING_RATE)
        run.parameters[name] = parameter.detach()
    for name, buffer in model.named_buffers():
        if "hash_indexes." not in name and _REMAPS not in name:
            run.buffers[name] = buffer.detach()
    return run
