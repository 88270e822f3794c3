"""Whether an exported program computes what the model does: both run on the same calls, in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recfx.discovery.sample import Sample, fixed_randomness
from recfx.exporter.model_copies import fresh_copy, own_buffers
from recfx.verification.compare_models import Difference, compare_tensors, largest_difference

_SEED = 20_261_122
_BIGGER, _ONE = "a bigger batch", "a batch of one"


def run_model(run: Callable[..., Any], sample: Sample) -> Any:
    """What one call returns, from fixed random numbers."""
    call = sample.clone()
    with torch.no_grad(), fixed_randomness(_SEED):
        return run(*call.args, **call.kwargs)


def resized(model: nn.Module, sample: Sample) -> Sample | None:
    """The sample with a bigger batch; None if its batch size is not known, or the model does not take it."""
    return next((call for name, call, _ in other_batches(model, sample) if name == _BIGGER), None)


def other_batches(model: nn.Module, sample: Sample) -> Iterator[tuple[str, Sample, Any]]:
    """Calls with other batches than the sample's, as far as the model takes them: their names, and its answers."""
    calls = {_BIGGER: sample.resized(), _ONE: sample.first(), "a batch without ids": sample.without_ids()}
    refused: set[str] = set()
    for name, call in calls.items():
        if call is None or (name == _ONE and _BIGGER in refused):  # what is not of the batch could be broadcast
            continue
        try:
            answer = run_model(fresh_copy(model)[0], call)
        except Exception:  # whatever the user's code raises
            refused.add(name)
            continue
        yield name, call, answer


def first_difference(
    wanted: list[tuple[str, torch.Tensor]],
    found: list[tuple[str, torch.Tensor]],
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> Difference | None:
    """The first output that differs; None if all are close."""
    if len(wanted) != len(found):
        return Difference("outputs", f"{len(found)} tensors instead of {len(wanted)}")
    for (place, expected), (_, actual) in zip(wanted, found, strict=True):
        difference = compare_tensors(place, expected, actual, rtol, atol)
        if difference is not None:
            return difference
    return None


def largest_output_difference(wanted: list[tuple[str, torch.Tensor]], found: list[tuple[str, torch.Tensor]]) -> float:
    """The largest absolute difference of any output."""
    pairs = zip(wanted, found, strict=True)
    return max((largest_difference(expected, actual) for (_, expected), (_, actual) in pairs), default=0.0)


def changed_buffer(model: nn.Module, sample: Sample) -> str | None:
    """The name of a buffer that every forward in eval mode changes, not only the first one; None if there is none."""
    copy, _ = fresh_copy(model)
    run_model(copy, sample)  # some modules prepare themselves then
    before = {name: buffer.clone() for name, buffer in own_buffers(copy).items()}
    run_model(copy, sample)
    after = own_buffers(copy)
    return next((name for name, value in before.items() if not torch.equal(after[name], value)), None)
