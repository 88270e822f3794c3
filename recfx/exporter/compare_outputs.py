"""Whether an exported program computes what the model does: both run on the same calls, in eval mode.

A file with the model's own rows is compared with the model. Quantized rows change the model's answers more than any
error of the program would, so then the reference is the model's own code around collections that hold the file's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from recfx.collections.copy_modules import copy_modules
from recfx.errors import Diagnostic, ExportError
from recfx.exporter.arguments import Signature
from recfx.exporter.model_copies import fresh_copy, own_buffers
from recfx.exporter.patterns import Pattern, identifier, take_apart
from recfx.exporter.served_collection import ServedCollection
from recfx.exporter.state import Unchanged, changes_state, refusing_changed_attributes, storage_of
from recfx.models.compare_models import Difference, compare_tensors, largest_difference
from recfx.models.sample import (
    Sample,
    filled,
    first,
    fixed_randomness,
    random_state,
    strided,
    tensors_of,
    varied,
    without_ids,
    without_samples,
)

BIGGER, ONE, NONE, EMPTY, STRIDED, VARIED = (
    "a bigger batch", "a batch of one", "a batch of no samples", "a batch without ids",
    "tensors that are not contiguous", "other values",
)  # fmt: skip
"""The names of the other batches on which a file is compared with the model."""


@dataclass(frozen=True)
class ModelCall:
    """A converted model, the calls of it on which its file is compared, and what its program takes and returns, which
    are the leaves of ``signature`` and ``returns``. ``served`` has what takes the place of each collection, by ``id``;
    ``failures`` collects why ways to a program were given up.
    """

    model: nn.Module
    served: Mapping[int, ServedCollection]
    sample: Sample
    other_calls: Mapping[str, Sample]
    outputs: Any
    signature: Signature
    returns: Pattern
    changed_buffer: str | None = None
    forward: str = "model"  # what the file's ``forward`` takes, as for ``export``
    failures: list[Diagnostic] = field(default_factory=list)

    @property
    def graphs(self) -> dict[int, nn.Module]:
        """The exported graph of each collection, by its ``id``."""
        return {key: served.graph_module for key, served in self.served.items()}

    def leaves(self, sample: Sample) -> list[Any]:
        """The program's arguments for a call."""
        return self.signature.flatten(sample.args, sample.kwargs)


_SEED = 20_261_122
_EXTREMES: dict[str, tuple[float, ...]] = {
    "NaN": (math.nan, 1.0),
    "infinite values": (math.inf, -math.inf),
    "values of 0": (0.0,),
    "great values": (1e6,),
    "great negative values": (-1e6,),
    "integers of 0": (0,),
    "negative integers": (-1,),
}
"""What dense values may be in a request, by the name of the batch: code that checks values takes its other branch."""
_Outputs = list[tuple[str, torch.Tensor]]


def run_model(run: Callable[..., Any], sample: Sample) -> Any:
    """What one call returns, with fixed random numbers."""
    call = sample.clone()
    with torch.no_grad(), fixed_randomness(_SEED):
        return run(*call.args, **call.kwargs)


def run_copy(model: nn.Module, sample: Sample, copy: nn.Module | None = None) -> Any:
    """What a copy of the model returns, which may not write into the model, nor draw numbers that no file can draw."""
    run = copy or fresh_copy(model)[0]

    def call(*args: Any, **kwargs: Any) -> Any:
        before = random_state()
        returned = run(*args, **kwargs)
        if random_state() != before:
            raise changes_state("", "the state of Python's or numpy's random numbers")
        return returned

    with Unchanged(model):
        return run_model(call, sample)


def other_batches(model: nn.Module, sample: Sample) -> Iterator[tuple[str, Sample, Any]]:
    """Calls with other batches than the sample's, as far as the model takes them: their names, and its answers."""
    calls = [
        (BIGGER, sample.resized()),
        (ONE, first(sample)),
        (NONE, without_samples(sample)),
        (EMPTY, without_ids(sample)),
        (STRIDED, strided(sample)),
        (VARIED, varied(sample, ids=True)),
        (VARIED, varied(sample, ids=False)),
        *((name, filled(sample, *values)) for name, values in _EXTREMES.items()),
    ]
    refused: set[str] = set()
    taken: set[str] = set()
    for name, call in calls:
        # What is not of the batch could be broadcast.
        if call is None or name in taken or (name in (ONE, NONE) and BIGGER in refused):
            continue
        try:
            answer = run_copy(model, call)
            if name == STRIDED:  # a model that reads the memory of its arguments is not compared on others
                pairs = zip(tensors_of(run_copy(model, sample)), tensors_of(answer), strict=True)
                if not all(_is_near(*pair, rtol=1e-5) for pair in pairs):
                    continue
        except ExportError:
            raise
        except Exception:  # whatever the user's code raises
            refused.add(name)
            continue
        taken.add(name)
        yield name, call, answer


def first_difference(
    reference: _Outputs, answer: _Outputs, rtol: float = 1e-5, atol: float = 1e-6
) -> Difference | None:
    """The first output that differs; None if all are close."""
    if len(reference) != len(answer):
        return Difference("outputs", f"{len(answer)} tensors instead of {len(reference)}")
    for (place, expected), (_, actual) in zip(reference, answer, strict=True):
        difference = compare_tensors(place, expected, actual, rtol, atol)
        if difference is not None:
            return difference
    return None


def changed_buffer(model: nn.Module, calls: Iterable[Sample]) -> str | None:
    """The name of a buffer that a second call with the same batch changes or replaces; nothing else may change."""
    copy, _ = fresh_copy(model)
    changed: list[str] = []
    for call in calls:
        run_copy(model, call, copy)  # some modules prepare themselves then
        before = {name: buffer.clone() for name, buffer in own_buffers(copy).items()}
        memory = {(name, id(buffer)): storage_of(buffer) for name, buffer in own_buffers(copy).items()}
        with refusing_changed_attributes(copy):
            run_copy(model, call, copy)
        for name, buffer in own_buffers(copy).items():
            storage = storage_of(buffer)
            if memory.get((name, id(buffer)), storage) != storage:  # by `.data =`, which no trace sees
                raise changes_state(name)
            changed += [name] * ((name, id(buffer)) not in memory)
        changed += _changed(before, copy)
    return next(iter(changed), None)


def _changed(before: Mapping[str, torch.Tensor], copy: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are not as they were."""
    after = own_buffers(copy)
    return {
        name: after[name]
        for name, value in before.items()
        if name in after and not _is_near(value, after[name], rtol=0)
    }


def _is_near(*tensors: torch.Tensor, rtol: float) -> bool:
    one, two = (tensor.cpu() if tensor.layout == torch.strided else tensor.cpu().to_dense() for tensor in tensors)
    return compare_tensors("", one, two, rtol, rtol) is None


def difference_of(
    call: ModelCall, run: Callable[..., dict[str, torch.Tensor]], buffers: Callable[[], Mapping[str, torch.Tensor]]
) -> float | Diagnostic:
    """The largest difference of an output of a program, which ``run`` calls, from the model's; or why it is another."""
    served = call.served.values()
    # Half rows that are not contiguous are looked up, and rounded, in another way than those of the file.
    is_exact = not any(error for each in served for error in each.errors.values())
    is_exact = is_exact and all(source.weight.is_contiguous() for each in served for source in each.tables.values())
    reference = call.model
    if not is_exact:  # the model, hooks and all, which looks up what the file holds
        reference, copies = copy_modules(call.model)
        for collection, each in call.served.items():
            collection_copy: Any = copies[collection]
            collection_copy.answer_with(copy_modules(each.graph_module)[0])
    of_sample = _by_name(call, call.outputs)
    largest = 0.0
    # One copy for all calls, because a model may change its buffers from call to call, and then so must the file.
    copy, _ = fresh_copy(reference)
    before = {name: buffer.clone() for name, buffer in own_buffers(copy).items()}
    if not is_exact:  # around stored rows, the model is called with what the file makes of a call
        remade = _by_name(call, run_copy(call.model, call.signature.call_of(call.leaves(call.sample))))
        if (difference := first_difference(of_sample, remade)) is not None:
            message = f"the model answers differently if it gets what the file makes of the sample: {difference}"
            return Diagnostic("export_differs", "", message)
    calls = {"": call.sample, **call.other_calls, "a second call with the sample": call.sample}
    for name, sample in calls.items():
        batch = f"for {name}, " if name else ""
        leaves = call.leaves(sample)
        try:
            # The reference may be around the file's own modules, which may be wrong about strides in both.
            asked = call.sample if name == STRIDED else sample
            asked = asked if is_exact else call.signature.call_of(call.leaves(asked))
            expected = _by_name(call, run_copy(call.model, asked, copy))
        except ExportError:
            raise
        except Exception as error:  # of the user's code
            return Diagnostic("export_differs", "", f"{batch}the model raises {type(error).__name__}: {error}")
        try:
            answer = list(run_model(run, Sample(*leaves)).items())
        except Exception as error:  # programs raise errors of many types
            if name == NONE:  # nobody is answered wrongly
                continue
            return Diagnostic("export_differs", "", f"{batch}the file raises {type(error).__name__}: {error}")
        # Sums of great values cancel, so what is left of them is as inexact as they are.
        floats = [value for _, value in expected if value.is_floating_point() and value.numel()]
        greatest = max((float(value.abs().nan_to_num(0, 0).max()) for value in floats), default=0)
        difference = first_difference(expected, answer, atol=1e-6 * max(1.0, greatest if name in _EXTREMES else 1.0))
        if difference is not None:
            changed = f"; a call of the model changes buffer {call.changed_buffer!r}" if call.changed_buffer else ""
            return Diagnostic("export_differs", "", f"{batch}the file answers differently: {difference}{changed}")
        for path, kept in _changed(before, copy).items():
            in_file = buffers()
            buffer = in_file.get(path, in_file.get(identifier(path, ())))
            if buffer is None or not _is_near(kept, buffer, rtol=1e-5):
                message = f"{batch}the file does not change buffer {path!r} as a call of the model does"
                return Diagnostic("export_differs", "", message)
        if not name:
            pairs = zip(of_sample, answer, strict=True)
            largest = max(largest_difference(output, actual) for (_, output), (_, actual) in pairs)
    return largest


def _by_name(call: ModelCall, outputs: Any) -> _Outputs:
    return [(name, output.detach().cpu()) for name, output in take_apart(call.returns, outputs).items()]
