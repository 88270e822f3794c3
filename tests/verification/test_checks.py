"""What is a difference between two steps, value by value."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch

from recfx.verification.compare_models import compare_runs
from recfx.verification.run_step import Run

TABLE = "ebc.embedding_bags.t.weight"
VALUE = torch.arange(6.0).view(3, 2)


def checks(original: Run, converted: Run, masked: Iterable[str] = ()) -> dict[tuple[str, str], tuple[float, str]]:
    compared = compare_runs(original, converted, 1e-3, 1e-3, frozenset(masked))
    return {(what, where): (largest, message) for what, where, largest, message in compared}


@pytest.mark.parametrize("what", ["outputs", "gradients", "parameters", "buffers"])
def test_every_value_is_compared(what: str) -> None:
    original, converted = Run(**{what: {"a": VALUE, "b": VALUE}}), Run(**{what: {"b": VALUE + 1, "a": VALUE.clone()}})
    assert checks(original, converted) == {
        (what, "a"): (0.0, ""),
        (what, "b"): (1.0, "largest difference 1"),
    }
    close = Run(**{what: {"a": VALUE, "b": VALUE + 2**-11}})
    assert checks(original, close)[what, "b"] == (2**-11, "")


@pytest.mark.parametrize("what", ["outputs", "gradients", "parameters", "buffers"])
def test_what_only_one_of_them_has(what: str) -> None:
    zeros = (0.0, "") if what == "gradients" else None
    for value, one in ((VALUE, None), (torch.zeros(3, 2), zeros)):
        has, lacks = Run(**{what: {"a": value}}), Run()
        assert checks(has, lacks) == {(what, "a"): one or (math.inf, "only the original model has it")}
        assert checks(lacks, has) == {(what, "a"): one or (math.inf, "only the converted model has it")}


def other_row(row: int) -> torch.Tensor:
    changed = VALUE.clone()
    changed[row] += 1
    return changed


def test_rows_that_were_not_touched_may_differ_if_the_rule_says_so() -> None:
    touched = {TABLE: torch.tensor([0, 2, 3])}  # 3: the row of zeros after a mapped table
    for what, masked, row, is_equal in [
        ("parameters", [TABLE], 1, True),
        ("parameters", [TABLE], 2, False),
        ("parameters", [], 1, False),
        ("parameters", ["other"], 1, False),
        ("gradients", [TABLE], 1, False),
    ]:
        original, converted = Run(**{what: {TABLE: VALUE}}, touched=touched), Run(**{what: {TABLE: other_row(row)}})
        assert (checks(original, converted, masked)[what, TABLE][1] == "") == is_equal, (what, masked, row)
    never_read = Run(parameters={TABLE: VALUE})
    assert checks(never_read, Run(parameters={TABLE: other_row(1)}), [TABLE])["parameters", TABLE][1]
