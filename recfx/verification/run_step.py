"""One forward, backward and optimizer step of a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from recfx.discovery.randomness import fixed_randomness
from recfx.discovery.sample import Sample, tensors_of
from recfx.runtime.training_checks import on_a_copy
from recfx.verification.run import Run
from recfx.verification.watch_calls import counted_calls, noted_lookups

LEARNING_RATE = 0.1


def run_step(
    model: nn.Module, call: Sample, training: bool, originals: Mapping[str, nn.Module] = MappingProxyType({})
) -> Run:
    """Run one step of ``model``. Pass a copy: the step changes it, and the result holds its tensors.

    The loss is a fixed random combination of all outputs. Parameters that still have a gradient after the backward
    (because no optimizer in backward took it) take an SGD step.

    Args:
        model: a copy.
        call: the arguments to call it with.
        training: the mode to run it in.
        originals: the collections of the model that ``model`` is a copy of, by path. If the copy still calls them, no
            backward is run, because it would leave gradients in the user's model.
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
        if parameter.grad is not None:
            run.gradients[name] = parameter.grad
            parameter.data.add_(parameter.grad, alpha=-LEARNING_RATE)
        run.parameters[name] = parameter.detach()
    for name, buffer in model.named_buffers():
        if "hash_indexes." not in name:
            run.buffers[name] = buffer.detach()
    return run
