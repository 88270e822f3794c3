"""One step of a model, and whether two steps, or two models in one mode, agree: value by value, on copies."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection, converted_collections
from recfx.collections.copy_modules import copy_with_tensors
from recfx.collections.kinds import CollectionKind, kind_of, standard_kind
from recfx.collections.replaced import calls_refused, refuse_calls
from recfx.collections.sharding.ranks_agree import any_rank
from recfx.models.sample import Sample, fixed_randomness, tensors_of
from recfx.models.verify_report import DIFFERENT, EQUAL, NOT_REPRODUCIBLE, Check
from recfx.runtime.in_flight import on_a_copy

COMPARED = ("outputs", "gradients", "parameters", "buffers")
"""The parts of two runs that are compared, in this order."""


@dataclass
class Run:
    """The result of one step."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)  # the model's output tensors, by position
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of parameters, and of inputs that require them
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # after the step
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # after the step, without those of indexes
    pooled: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)  # outputs of collections, by path and key
    touched: dict[str, torch.Tensor] = field(default_factory=dict)  # rows that standard collections read, by parameter
    called: set[str] = field(default_factory=set)  # paths of the collections that the forward called


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
    """Run one step of ``model``, a copy: the result holds its tensors. The loss is a fixed random combination of all
    outputs. Parameters that still have a gradient after the backward take an SGD step.
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


def batch_sizes(sample: Sample) -> list[tuple[str, Sample | None]]:
    """The calls to compare with, by name; the second is None if the sample's batch size is unknown."""
    return [("sample", sample), ("sample + 1", sample.resized())]


@dataclass(frozen=True)
class Difference:
    """A difference between two runs: the value that differs, and how."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def compare_tensors(
    where: str, expected: torch.Tensor, actual: torch.Tensor, rtol: float, atol: float
) -> Difference | None:
    """The difference; None if shape and dtype are equal and the values are close."""
    if expected.shape != actual.shape:
        return Difference(where, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if expected.dtype != actual.dtype:
        return Difference(where, f"dtype {actual.dtype} instead of {expected.dtype}")
    if torch.allclose(expected, actual, rtol=rtol, atol=atol, equal_nan=True):
        return None
    return Difference(where, f"largest difference {largest_difference(expected, actual):.3g}")


def largest_difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """The largest absolute difference: 0 for empty tensors; inf if one has a NaN or the shapes differ."""
    expected, actual = expected.detach(), actual.detach()
    if expected.shape != actual.shape:
        return math.inf
    if expected.numel() == 0 or torch.equal(expected, actual):
        return 0.0
    same = (expected == actual) | (expected.isnan() & actual.isnan())  # inf - inf is NaN, too
    difference = (expected.double() - actual.double()).abs().masked_fill(same, 0.0)
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())


def compare_runs(
    expected_run: Run, actual_run: Run, rtol: float = 1e-5, atol: float = 1e-6, masked: Collection[str] = ()
) -> Iterator[Check]:
    """Every value of two steps. Rows of ``masked`` weights may differ if the batch did not use them."""
    for what in COMPARED:
        expected, actual = getattr(expected_run, what), getattr(actual_run, what)
        for where in sorted(expected.keys() | actual.keys()):
            pair = [expected.get(where), actual.get(where)]
            if what == "parameters" and where in masked:
                pair = [touched(value, expected_run.touched.get(where)) for value in pair]
            first, second = pair
            largest, message = 0.0, ""
            if first is None or second is None:
                if what != "gradients" or bool((second if first is None else first).any()):  # a missing one is zero
                    largest = math.inf
                    message = f"only the {'converted' if first is None else 'original'} model has it"
            elif first.dtype != second.dtype or not torch.equal(first, second):
                difference = compare_tensors(where, first, second, rtol, atol)
                largest = largest_difference(first, second)
                message = "" if difference is None else difference.message
            yield Check("", "", what, where, DIFFERENT if message else EQUAL, largest, message)


def compare_twice(
    expected: Run, actual: Run, again: Callable[[], Run], *tolerances: Any, on_any_rank: Callable[[bool], bool] = bool
) -> list[Check]:
    """As ``compare_runs``, whose further arguments are ``tolerances``; what differs from ``again`` as well, the
    expected step taken once more, is not reproducible. ``on_any_rank``: whether it is so on any rank that compares with
    others.
    """
    checks = list(compare_runs(expected, actual, *tolerances))
    if not on_any_rank(any(check.message for check in checks)):
        return checks
    unsteady = {(check.what, check.where) for check in compare_runs(expected, again(), *tolerances) if check.message}
    why = "the original differs from itself under one seed"
    return [
        replace(check, status=NOT_REPRODUCIBLE, message=why)
        if check.message and (check.what, check.where) in unsteady
        else check
        for check in checks
    ]


def touched(value: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor | None:
    """The rows that the batch used: a fused step updates only these, a dense step may update others."""
    return value if value is None or rows is None else value[rows[rows < value.shape[0]]]


def compare_forward(
    expected: nn.Module, actual: nn.Module, sample: Sample, training: bool
) -> Difference | Exception | None:
    """The first difference between steps of two models, on copies, at two batch sizes in one mode, that the model does
    not have from itself; or the error of ``expected`` if it fails on the sample. Collective with sharded collections.
    """
    on_any_rank = partial(any_rank, [one.process_group for one in converted_collections(expected).values()])

    def step(model: nn.Module, call: Sample) -> Run:
        return run_step(copy_with_tensors(model), call, training)

    for _, call in batch_sizes(sample):
        if on_any_rank(call is None) or call is None:
            continue
        try:
            expected_run = step(expected, call)
        except Exception as error:  # the model itself fails, so there is nothing to compare with
            if call is sample:
                return error
            continue
        try:
            actual_run = step(actual, call)
        except Exception as error:
            return Difference("forward", f"raises {type(error).__name__}: {error}")
        # A graph may have more buffers: tensors that the model's code makes, or keeps as attributes.
        actual_run.buffers = {
            name: actual_run.buffers[name] for name in expected_run.buffers if name in actual_run.buffers
        }
        again = partial(step, expected, call)
        checks = compare_twice(expected_run, actual_run, again, on_any_rank=on_any_rank)
        differing = [Difference(f"{one.what} {one.where}", one.message) for one in checks if one.status == DIFFERENT]
        if on_any_rank(bool(differing)):
            return differing[0] if differing else Difference("another rank", "its values differ")
    return None
