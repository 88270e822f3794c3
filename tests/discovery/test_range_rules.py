"""Each rule of value ranges against torch itself, at the extremes, in int32 and in int64."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.discovery.models_of_ids import Model, batch, extremes, range_of

# fmt: off
CASES: dict[str, tuple[Callable[[Any, Tensor], Any], tuple[int, int] | None]] = {
    "%": (lambda self, ids: ids % 10, (0, 9)),
    "% of one": (lambda self, ids: ids % 1, (0, 0)),
    "% negative": (lambda self, ids: ids % -10, (-9, 0)),
    "remainder": (lambda self, ids: torch.remainder(ids, 10), (0, 9)),
    "method remainder": (lambda self, ids: ids.remainder(10), (0, 9)),
    "% twice": (lambda self, ids: ids % 10 % 100, (0, 9)),
    "% of a clamp": (lambda self, ids: ids.clamp(0, 5) % 10, (0, 5)),
    "fmod": (lambda self, ids: torch.fmod(ids, 10), (-9, 9)),
    "fmod negative": (lambda self, ids: ids.fmod(-10), (-9, 9)),
    "fmod of what is not negative": (lambda self, ids: ids.clamp(min=0).fmod(10), (0, 9)),
    "fmod of what is not positive": (lambda self, ids: ids.clamp(max=0).fmod(10), (-9, 0)),
    "fmod, then +": (lambda self, ids: ids.fmod(10) + 9, (0, 18)),
    "clamp": (lambda self, ids: ids.clamp(3, 9), (3, 9)),
    "clamp by name": (lambda self, ids: torch.clamp(ids, max=9, min=-2), (-2, 9)),
    "clamp of crossed bounds": (lambda self, ids: ids.clamp(20, 9), (9, 9)),
    "clip": (lambda self, ids: torch.clip(ids, 0, 9), (0, 9)),
    "clamp min alone": (lambda self, ids: ids.clamp(min=0), (0, 2**63 - 1)),
    "clamp max alone": (lambda self, ids: ids.clamp(max=9), (-(2**63), 9)),
    "clamp_min, clamp_max": (lambda self, ids: ids.clamp_min(2).clamp_max(9), (2, 9)),
    "minimum and maximum": (lambda self, ids: torch.maximum(torch.minimum(ids % 50, ids % 10), ids % 5), (0, 9)),
    "&": (lambda self, ids: ids & 15, (0, 15)),
    "& with gaps": (lambda self, ids: ids & 10, (0, 10)),
    "//": (lambda self, ids: (ids % 100) // 10, (0, 9)),
    "// of negative ones": (lambda self, ids: ids.fmod(10) // 4, (-3, 2)),
    "+": (lambda self, ids: ids % 10 + 5, (5, 14)),
    "-": (lambda self, ids: 5 - ids % 10, (-4, 5)),
    "- of two": (lambda self, ids: ids % 10 - ids % 10, (-9, 9)),  # it does not see that they are equal
    "*": (lambda self, ids: (ids % 10) * -3, (-27, 0)),
    "abs": (lambda self, ids: ids.fmod(10).abs(), (0, 9)),
    "bucketize": (lambda self, ids: torch.bucketize(ids, self.borders), (0, 3)),
    "searchsorted": (lambda self, ids: torch.searchsorted(self.borders, ids % 100), (0, 3)),
    "a table of ids": (lambda self, ids: self.remap[ids % 4], (3, 96)),
    "an embedding": (
        lambda self, ids: nn.functional.embedding(ids % 4, self.remap.unsqueeze(1)).squeeze(1),
        (3, 96),
    ),
    "cat": (lambda self, ids: torch.cat([ids % 10, ids % 20])[: 0 - 20], (0, 19)),
    "where": (lambda self, ids: torch.where(ids > 0, ids % 10, 50), (0, 50)),
    "where of one that is not known": (lambda self, ids: torch.where(ids > 0, ids % 10, ids), None),
    "long": (lambda self, ids: (ids % 10).long().to(torch.int32).int(), (0, 9)),
    "shapes": (lambda self, ids: (ids % 10).view(-1, 1).flatten().contiguous().clone(), (0, 9)),
    # The last operator bounds the result of a hash.
    "% of shifted bits": (lambda self, ids: (ids ^ (ids >> 29)) % 7, (0, 6)),
    "% of a product that overflows": (lambda self, ids: (ids * 2654435761) % 7, (0, 6)),
    "fmod of a sum that overflows": (lambda self, ids: (ids + ids).fmod(7), (-6, 6)),
    "clamp of bits": (lambda self, ids: (ids << 3 | ids).clamp(0, 9), (0, 9)),
    "& of what is turned around": (lambda self, ids: torch.bitwise_xor(-ids, 6).bitwise_not() & 1, (0, 1)),
    "% of a divided product": (lambda self, ids: (ids * ids // -3) % 5, (0, 4)),
    "% of a remainder of another": (lambda self, ids: (ids % (ids | 1)) % 5, (0, 4)),
    "% of fractions and bits": (lambda self, ids: (ids ^ ids) * 0.5 % 7, None),
    "bits alone": (lambda self, ids: ids ^ (ids >> 29), None),
    # It may wrap around.
    "+ that overflows": (lambda self, ids: ids + 1, None),
    "* that overflows int32": (lambda self, ids: (ids % 3_000) * 1_000_000, None),
    "* that does not overflow int64": (lambda self, ids: (ids % 3_000).long() * 1_000_000, (0, 2_999_000_000)),
    "* that overflows int64": (lambda self, ids: (ids % 3_000).long() * 10**16, None),
    "abs of the lowest": (lambda self, ids: ids.abs(), None),
    "a cast that wraps": (lambda self, ids: (ids % 2**31).long().mul(2).int(), (-(2**31), 2**31 - 1)),
    "+ after a cast that wraps": (lambda self, ids: (ids % 2**31).long().mul(2).int() + 1, None),
    # Nothing is known.
    "the ids themselves": (lambda self, ids: ids, None),
    "fractions": (lambda self, ids: (ids % 10.5).long(), None),
    "floats": (lambda self, ids: (ids.float() % 10).long(), None),
    "other bits": (lambda self, ids: (ids % 10).long().view(torch.int32)[::2], None),
    "where by name": (lambda self, ids: torch.where(ids > 0, ids % 10, other=ids), None),
    "abs by name": (lambda self, ids: torch.abs(input=ids.fmod(10)), (0, 9)),
    "flatten by name": (lambda self, ids: torch.flatten(input=ids % 10), (0, 9)),
    "a table of ids that is saved": (lambda self, ids: self.learned[ids % 4], None),
}
# fmt: on


def what_torch_does(change: Callable[[Any, Tensor], Any], model: Any, dtype: torch.dtype) -> Tensor | None:
    """The ids that the collection gets; None where torch refuses, as for a number that int32 lacks."""
    try:
        return change(model, extremes(dtype))
    except RuntimeError as error:
        if not re.search("overflow|ZeroDivision", str(error)):
            raise
        return None


@pytest.mark.parametrize("case", CASES)
def test_a_rule_says_what_torch_does(case: str) -> None:
    change, expected = CASES[case]
    model = Model(change)
    id_range = range_of(model, batch(extremes(torch.int64)))
    assert (None if id_range is None else (id_range.lower, id_range.upper)) == expected
    for dtype in (torch.int64, torch.int32):
        seen = what_torch_does(change, model, dtype)
        if id_range is not None and seen is not None:
            assert id_range.lower <= int(seen.min())
            assert int(seen.max()) <= id_range.upper
            if dtype == torch.int64 and case not in _WIDER:
                assert (int(seen.min()), int(seen.max())) == (
                    id_range.lower,
                    id_range.upper,
                )  # no wider than it must be


_WIDER = ("- of two", "a cast that wraps", "minimum and maximum", "where", "cat", "& with gaps")


# What a chain is made of: numbers at the borders of types and of each other, and every way to use them.
_NUMBERS = st.sampled_from([-(2**31), -40, -7, -1, 1, 2, 9, 64, 1000, 2**20, 2**31 - 1, 2**33])
_STEPS: dict[str, Callable[[Any, int, Any], Any]] = {
    "%": lambda ids, number, other: ids % number,
    "fmod": lambda ids, number, other: ids.fmod(number),
    "clamp": lambda ids, number, other: ids.clamp(min=number),
    "clamp both": lambda ids, number, other: torch.clamp(ids, -number, number),
    "clamp_max": lambda ids, number, other: ids.clamp_max(number),
    "+": lambda ids, number, other: ids + number,
    "number -": lambda ids, number, other: number - ids,
    "*": lambda ids, number, other: ids * number,
    "//": lambda ids, number, other: ids // number,
    "&": lambda ids, number, other: ids & number,
    "abs": lambda ids, number, other: ids.abs(),
    "^ other": lambda ids, number, other: ids ^ other,
    "| number": lambda ids, number, other: ids | number,
    ">>": lambda ids, number, other: ids >> 7,
    "<<": lambda ids, number, other: ids << 7,
    "~": lambda ids, number, other: ~ids,
    "long": lambda ids, number, other: ids.long(),
    "int": lambda ids, number, other: ids.int(),
    "+ other": lambda ids, number, other: ids + other,
    "- other": lambda ids, number, other: ids - other,
    "* other": lambda ids, number, other: ids * other,
    "where": lambda ids, number, other: torch.where(ids > number, ids, other),
    "minimum": lambda ids, number, other: torch.minimum(ids, other),
    "maximum": lambda ids, number, other: torch.maximum(ids, other),
}


@given(steps=st.lists(st.tuples(st.sampled_from(sorted(_STEPS)), _NUMBERS, st.integers(0, 20)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_no_id_is_outside_of_the_range_of_a_random_chain(steps: list[tuple[str, int, int]]) -> None:
    def change(self: Any, ids: Any) -> Any:
        values = [ids]  # each step takes the last value, and one of all that came before
        for name, number, place in steps:
            values.append(_STEPS[name](values[-1], number, values[place % len(values)]))
        return values[-1]

    id_range = range_of(Model(change), batch(extremes(torch.int64)))
    for dtype in (torch.int64, torch.int32):
        seen = what_torch_does(change, None, dtype)
        if id_range is not None and seen is not None:
            assert id_range.lower <= int(seen.min())
            assert int(seen.max()) <= id_range.upper
