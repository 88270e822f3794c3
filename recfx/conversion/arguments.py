"""Checks of the arguments of ``convert``."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.types import ShardingEnv

from recfx.discovery.discover import check_module
from recfx.errors import ConversionError
from recfx.sharding.planned_ranks import check_plan
from recfx.tracing.sample import Sample


def check_arguments(
    model: Any, call: Sample | None, plan: Any, env: Any, whole_graph: bool, verify: bool | None, on_unsupported: str
) -> None:
    """Check the arguments of ``convert``, which have the same names here; ``call`` is the sample.

    Raises:
        ConversionError: ``invalid_argument``, ``sample_required``.
    """
    check_module(model)
    if on_unsupported not in ("error", "keep"):
        raise ConversionError(
            f"on_unsupported is {on_unsupported!r}.", reason="invalid_argument", what_to_do="use 'error' or 'keep'."
        )
    if plan is not None:
        check_plan(plan)
    if env is not None and not isinstance(env, ShardingEnv):
        raise ConversionError(
            f"env is a {type(env).__name__}.",
            reason="invalid_argument",
            what_to_do="pass torchrec.distributed.types.ShardingEnv.from_process_group(group).",
        )
    if call is None and (whole_graph or verify):
        raise ConversionError(
            f"{'whole_graph' if whole_graph else 'verify'}=True needs a sample.",
            reason="sample_required",
            what_to_do="pass sample=(inputs, ...), one call of the model.",
        )
