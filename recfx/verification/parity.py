"""Whether two models agree in one mode: compares a whole graph with the Python model, on copies."""

from __future__ import annotations

from functools import partial

from torch import nn

from recfx.collections.converted_collection import converted_collections
from recfx.collections.copy_modules import copy_with_tensors
from recfx.collections.sharding.ranks_agree import any_rank
from recfx.discovery.sample import Sample
from recfx.verification.compare_models import batch_sizes, compare_models
from recfx.verification.compare_tensors import Difference, compare_tensors
from recfx.verification.run import COMPARED, Run
from recfx.verification.run_step import run_step


def compare_forward(expected: nn.Module, actual: nn.Module, sample: Sample, training: bool) -> Difference | str | None:
    """Compare one step of two models, on copies, at two batch sizes in one mode.

    With sharded collections the steps communicate: all ranks compare together and agree on the result.

    Returns:
        the first difference in outputs, gradients, parameters or buffers; None if they agree; text if ``expected``
        itself fails on the sample, so that nothing was compared.
    """
    on_any_rank = partial(any_rank, [each.process_group for each in converted_collections(expected).values()])
    for _, call in batch_sizes(sample):
        if on_any_rank(call is None) or call is None:
            continue
        outcome = compare_models(
            partial(_step, expected, call, training),
            partial(_step, actual, call, training),
            _first_difference,
            lambda difference: [] if difference is None else [difference.where],
            any_rank=on_any_rank,
        )
        if outcome.expected_error is not None:
            if call is sample:
                return f"{type(outcome.expected_error).__name__}: {outcome.expected_error}"
            continue
        if outcome.actual_error is not None:
            return Difference("forward", f"raises {type(outcome.actual_error).__name__}: {outcome.actual_error}")
        if outcome.unsteady is not None and not on_any_rank(bool(outcome.unsteady)):
            return outcome.result or Difference("another rank", "its values differ")
        # Otherwise they agree, or the model differs from itself under the same seed.
    return None


def _step(model: nn.Module, call: Sample, training: bool) -> Run:
    return run_step(copy_with_tensors(model), call, training)


def _first_difference(wanted: Run, found: Run) -> Difference | None:
    for what in COMPARED:
        expected, actual = getattr(wanted, what), getattr(found, what)
        if set(expected) != set(actual):
            return Difference(what, f"only one of them has {sorted(set(expected) ^ set(actual))}")
        for name, value in expected.items():
            difference = compare_tensors(f"{what} {name}", value, actual[name], rtol=1e-5, atol=1e-6)
            if difference is not None:
                return difference
    return None
