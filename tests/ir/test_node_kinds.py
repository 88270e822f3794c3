"""The declarations of node kinds agree with each other."""

from __future__ import annotations

from recfx.ir.node_kinds import CUTS, NODE_KINDS, ValueType


def test_the_cuts_are_in_the_order_of_the_stages() -> None:
    assert CUTS == ("input_dist_start", "input_dist_wait", "output_dist_wait")
    stages = [NODE_KINDS[kind].stage.value for kind in CUTS]
    assert stages == sorted(stages)


def test_no_value_goes_back_to_an_earlier_stage() -> None:
    givers = {type_: kind for kind in NODE_KINDS.values() for type_ in kind.outputs}
    for kind in NODE_KINDS.values():
        for taken in kind.inputs:
            for type_ in set(taken.types) - {ValueType.BATCH}:
                assert givers[type_].stage.value <= kind.stage.value, (kind.name, type_)


def test_every_value_is_given_and_taken() -> None:
    given = {type_ for kind in NODE_KINDS.values() for type_ in kind.outputs}
    taken = {type_ for kind in NODE_KINDS.values() for each in kind.inputs for type_ in each.types}
    assert {ValueType.BATCH, *given} == {ValueType.KEYED_TENSOR, *taken} == set(ValueType)
