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
from recfx.collections.replaced import calls_refused, refuse_calls
from recfx.discovery.sample import Sample, fixed_randomness, tensors_of
from recfx.runtime.in_flight import on_a_copy

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
        called: paths of the collections that the forward called.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    pooled: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    touched: dict[str, torch.Tensor] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)


@contextlib.contextmanager
def noted_lookups(model: nn.Module, run: Run) -> Iterator[None]:
    """Record in ``run`` what every collection pools, and which rows standard ones read."""

    def outputs(path: str, kind: CollectionKind, module: nn.Module, inputs: Any, output: Any) -> None:
        run.called.add(path)
        run.pooled.update({(path, key): value.detach().clone() for key, value in kind.values_of(output).items()})

    def rows(name: str, table: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        read = (named["input"] if "input" in named else inputs[0]).detach().to(torch.int64)
        run.touched[name] = torch.unique(torch.cat([run.touched.get(name, read), read]))

    with contextlib.ExitStack() as handles:
        for path, module in model.named_modules():
            kind = None if isinstance(module, ConvertedCollection) else standard_kind(module)
            if isinstance(module, UnshardedCollection) or kind is not None:
                # Before the hooks of the user, which may return something else.
                note_outputs = partial(outputs, path, kind_of(module))
                handles.enter_context(module.register_forward_hook(note_outputs, prepend=True))
            if kind is None:
                continue
            for table, bag in kind.tables_of(module).items():
                note_rows = partial(rows, kind.weight_name(path, table))
                handles.enter_context(bag.register_forward_pre_hook(note_rows, with_kwargs=True))
        yield


LEARNING_RATE = 0.1
_REMAPS = "_managed_collision_collection."  # what it holds is in the indexes of a converted collection


def run_step(
    model: nn.Module, call: Sample, training: bool, originals: Mapping[str, nn.Module] = MappingProxyType({})
) -> Run:
    """Run one step of ``model``, a copy: the step changes it, and the result holds its tensors. The loss is a fixed
    random combination of all outputs. Parameters that still have a gradient after the backward (because no optimizer in
    backward took it) take an SGD step.
    """
    run = Run()
    model.train(training)
    call = call.clone()
    with fixed_randomness(), on_a_copy(), noted_lookups(model, run):
        with calls_refused(originals):
            outputs = tensors_of(model(*call.args, **call.kwargs))
        for position, output in enumerate(outputs):
            run.outputs[str(position)] = output.detach().clone()
        generator = torch.Generator().manual_seed(1)
        loss: Any = 0.0
        for output in outputs:
            if output.requires_grad:
                weights = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
                loss = loss + (output * weights).sum() / max(1, output.shape[0] if output.dim() else 1)
        if isinstance(loss, torch.Tensor):
            loss.backward()
    for path in run.called:
        refuse_calls(model.get_submodule(path), path)  # in case that code keeps it
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
