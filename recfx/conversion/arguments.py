"""Checks of the arguments of ``convert``."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.types import ShardingEnv

from recfx.collections.sharding.whole_plan import check_plan
from recfx.discovery.sample import Sample
from recfx.errors import ConversionError, type_of
from recfx.replacement.decide import sample_required


def check_arguments(call: Sample | None, plan: Any, env: Any, whole_graph: bool) -> None:
    """Check the arguments of ``convert`` that say more than what becomes of each collection; ``call`` is the sample.

    Raises:
        ConversionError: ``invalid_argument``, ``sample_required``.
    """
    if plan is not None:
        check_plan(plan)
    if env is not None and not isinstance(env, ShardingEnv):
        raise ConversionError(
            f"env is {type_of(env)}.",
            reason="invalid_argument",
            what_to_do="pass torchrec.distributed.types.ShardingEnv.from_process_group(group).",
        )
    if call is None and whole_graph:
        raise sample_required("whole_graph")
