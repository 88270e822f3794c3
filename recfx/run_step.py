"""One forward, backward and optimizer step of a model, with everything worth comparing written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from recfx.collection import HashEmbeddingBagCollection, weight_name
from recfx.nodes.training_checks import on_a_copy
from recfx.randomness import fixed_randomness
from recfx.sample import Sample, tensors_of

LEARNING_RATE = 0.1


@dataclass
class Run:
    """What one step gave.

    Args:
        outputs: the model's output tensors, by position.
        gradients: of parameters and of inputs that require them.
        parameters: after the step.
        buffers: after the step; those of the indexes are not compared.
        pooled: output of every collection, by path and key.
        touched: rows that the batch used, by parameter name; of standard collections only.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    pooled: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    touched: dict[str, torch.Tensor] = field(default_factory=dict)


def run_step(model: nn.Module, call: Sample, training: bool) -> Run:
    """Run one step of ``model``, which it changes, and whose tensors the result holds: pass a copy.

    The loss is a fixed random combination of all outputs. Parameters that still have a gradient after the backward (no
    optimizer in backward took it) make an SGD step.
    """
    run = Run()
    model.train(training)
    handles = _watch(model, run)
    call = call.clone()
    with fixed_randomness(), on_a_copy():
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
    for handle in handles:
        handle.remove()
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


def _watch(model: nn.Module, run: Run) -> list[Any]:
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, (EmbeddingBagCollection, HashEmbeddingBagCollection)):
            handles.append(module.register_forward_hook(partial(_note_pooled, run, path)))
        if isinstance(module, EmbeddingBagCollection):
            for table, bag in module.embedding_bags.items():
                hook = partial(_note_rows, run, weight_name(path, table))
                handles.append(bag.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def _note_pooled(run: Run, path: str, module: nn.Module, inputs: Any, output: KeyedTensor) -> None:
    for key, value in output.to_dict().items():
        run.pooled[path, key] = value.detach().clone()


def _note_rows(run: Run, name: str, bag: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
    rows = (named["input"] if "input" in named else inputs[0]).detach().to(torch.int64)
    seen = run.touched.get(name)
    run.touched[name] = torch.unique(rows if seen is None else torch.cat([seen, rows]))
