"""The declarations of node kinds agree with each other."""

from __future__ import annotations

import torch

from recfx.ir.node_kinds import ASSEMBLERS, CUTS, NODE_KINDS, UNPOOLED_FORMS, ValueType
from recfx.ir.tables import TableSpec, columns_of, output_dtype, total_bytes


def test_the_cuts_are_in_the_order_of_the_stages() -> None:
    assert CUTS == ("input_dist_start", "input_dist_wait", "hash_ids", "output_dist_wait")
    stages = [NODE_KINDS[kind].stage.value for kind in CUTS]
    assert stages == sorted(stages)


def test_no_value_goes_back_to_an_earlier_stage() -> None:
    for giver in NODE_KINDS.values():
        for kind in NODE_KINDS.values():
            taken = {type_ for declared in kind.inputs for type_ in declared.types}
            if taken & set(giver.outputs):
                assert giver.stage.value <= kind.stage.value, (giver.name, kind.name)


def test_every_value_is_given_and_taken() -> None:
    produced = {type_ for kind in NODE_KINDS.values() for type_ in kind.outputs}
    taken = {type_ for kind in NODE_KINDS.values() for declared in kind.inputs for type_ in declared.types}
    begins = {ValueType.BATCH, *UNPOOLED_FORMS.values()}  # the latter are given where rows are not combined
    ends = {output for kind in ASSEMBLERS for output in NODE_KINDS[kind].outputs}
    assert begins | produced == ends | taken == set(ValueType)


def test_sizes_follow_the_dtype_of_the_output() -> None:
    def spec(name: str, output_dtype: torch.dtype) -> TableSpec:
        return TableSpec(name, (name,), (name,), 10, 4, "SUM", None, 0.0, 0.0, output_dtype=output_dtype)

    half, single = spec("half", torch.float16), spec("single", torch.float32)
    assert output_dtype((half,)) == torch.float16
    assert output_dtype((half, single)) == torch.float32
    assert output_dtype(()) == torch.float32
    assert total_bytes(columns_of((half, single))) == 4 * 2 + 4 * 4
