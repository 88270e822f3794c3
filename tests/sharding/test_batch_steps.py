"""The steps of a batch one by one: what a call keeps, and what becomes of calls that were sent before a step failed."""

from __future__ import annotations

from typing import Any

import pytest

from recfx.errors import OutOfStepError
from recfx.runtime.marks import has_failed
from tests.sharding.cases import Case, Table, batches
from tests.sharding.cases import sharded_model as sharded_parts
from tests.sharding.ranks import ranks
from tests.support.refusals import refused

CASE = Case(
    (Table("rows", 24, 8, ("f0",), "SUM", ("row_wise",)), Table("one", 24, 8, ("f1",), "SUM", ("table_wise", 0)))
)


def fails_between(rank: int, world_size: int, case: Case) -> list[str]:
    """Two batches are sent; the first one's lookup fails."""
    module: Any = sharded_parts(case, world_size).sparse
    calls = []
    for step in batches(case, world_size, 2):
        context = module.create_context()
        calls.append((context, module.input_dist(context, step[rank]).wait().wait()))
        assert "features" not in context.values  # the batch itself is not kept

    def fail(*_: Any) -> None:
        raise ValueError("not this one")

    handles = [lookup.register_forward_pre_hook(fail) for lookup in module._lookups]
    with pytest.raises(ValueError, match="not this one"):
        module.compute(*calls[0])
    for handle in handles:
        handle.remove()
    assert has_failed(module.groups.pooled)
    third, said = module.create_context(), []
    for call in (
        lambda: module.compute(*calls[1]),
        lambda: module.input_dist(third, batches(case, world_size, 1)[0][rank]),
        module.in_step.refuse_if_failed,
    ):
        with refused("out_of_step", "sparse", error=OutOfStepError) as caught:
            call()
        said.append(caught.value.message)
    return said


def test_after_a_step_that_failed_nothing_that_was_sent_before_is_run() -> None:
    for said in ranks(2).run(fails_between, Case(CASE.tables[:1])):  # a table with a lookup on every rank
        assert len(said) == 3
        assert all(message.endswith("too (sparse: ValueError: not this one).") for message in said)
