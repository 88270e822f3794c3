"""One forward, backward and optimizer step of a model, with everything worth comparing written down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.modules.converted_collection import ConvertedCollection, weight_name
from recfx.nodes import SelectFeatures
from recfx.nodes.training_checks import on_a_copy
from recfx.tracing.randomness import fixed_randomness
from recfx.tracing.sample import Sample, tensors_of

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
        calls: how often the forward called each collection, by path.
        originals: paths of the collections of which it called the original, not the copy: then nothing else ran.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    pooled: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    touched: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    originals: set[str] = field(default_factory=set)


def run_step(
    model: nn.Module, call: Sample, training: bool, originals: Mapping[str, nn.Module] = MappingProxyType({})
) -> Run:
    """Run one step of ``model``, which it changes, and whose tensors the result holds: pass a copy.

    The loss is a fixed random combination of all outputs. Parameters that still have a gradient after the backward (no
    optimizer in backward took it) make an SGD step.

    Args:
        model: a copy.
        call: what to call it with.
        training: the mode to run it in.
        originals: the collections of what ``model`` is a copy of, by path. A copy that still calls them has no
            backward, which would leave gradients in the user's model.
    """
    run = Run()
    model.train(training)
    handles = _watch(model, run)
    call = call.clone()
    with fixed_randomness(), on_a_copy():
        with _counted(model, originals, run):
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


@contextlib.contextmanager
def _counted(model: nn.Module, originals: Mapping[str, nn.Module], run: Run) -> Iterator[None]:
    """Count the calls of collections, by what runs inside them: their ``forward`` may be called without their hooks."""
    watched = {id(module): (path, module) for path, module in originals.items()}
    watched |= {id(module): (path, module) for path, module in model.named_modules()}
    own = {id(module) for module in model.modules()}
    handles = []
    for key, (path, module) in watched.items():
        if isinstance(module, HashEmbeddingBagCollection):
            module.fused_optimizers()  # one attached since makes the graph anew, which the hook must see
            parts = [part for part in module.graph_module.modules() if isinstance(part, SelectFeatures)]
            hook = partial(_note_call, run, path, key in own)
        elif isinstance(module, EmbeddingBagCollection) and len(module.embedding_bags):
            parts = [next(iter(module.embedding_bags.values()))]
            features = len(module.embedding_bag_configs()[0].feature_names)
            hook = partial(_note_bag_call, run, path, key in own, [0], features)
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


def _note_bag_call(
    run: Run, path: str, own: bool, seen: list[int], features: int, bag: nn.Module, inputs: Any, named: dict[str, Any]
) -> None:
    """The standard forward calls a table once per feature, and names all three arguments.

    The user's own code may call the table by itself; it hardly names them all.
    """
    if not inputs and len(named) == 3:
        seen[0] += 1
        if seen[0] % features == 0:
            _note_call(run, path, own, bag, inputs, named)


def _watch(model: nn.Module, run: Run) -> list[Any]:
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection) or (
            isinstance(module, ConvertedCollection) and not module.is_sharded
        ):
            handles.append(module.register_forward_hook(partial(_note_pooled, run, path)))
        # A converted subclass is an instance of both.
        if isinstance(module, EmbeddingBagCollection) and not isinstance(module, ConvertedCollection):
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
