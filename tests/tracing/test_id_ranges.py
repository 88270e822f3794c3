"""Value ranges of ids: each rule against torch itself, at the extremes, in int32 and in int64."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor

import recfx
from recfx.discovery.discover import discover
from recfx.ir.id_range import IdRange
from recfx.tracing.sample import Sample

_REMAP = torch.tensor([40, 3, 96, 7])
_BORDERS = torch.tensor([1.5, 2.5, 10.0])


class Shift(nn.Module):
    """A module of the user's, whose code is not traced: it changes its argument."""

    def forward(self, ids: Tensor) -> Tensor:
        return ids.add_(500)


class Model(nn.Module):
    """Does something to its ids before they reach the collection."""

    def __init__(self, change: Callable[[Any, Tensor], Any], rows: int = 100) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=rows, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[table])
        self.change = [change]
        self.register_buffer("remap", _REMAP.clone(), persistent=False)
        self.register_buffer("learned", _REMAP.clone())
        self.shift, self.passes_on = Shift(), nn.Threshold(5, 500, inplace=True)
        self.register_buffer("borders", _BORDERS.clone())

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        changed = self.change[0](self, features.values())
        lengths = features.lengths()
        return self.ebc(KeyedJaggedTensor(keys=["f"], values=changed, lengths=lengths)).values()


def batch(ids: list[int] | Tensor) -> KeyedJaggedTensor:
    values = torch.as_tensor(ids)
    return KeyedJaggedTensor(["f"], values, lengths=torch.tensor([values.numel()]))


def range_of(model: nn.Module, *sample: Any) -> IdRange | None:
    """What the trace knows of the ids of feature ``f``."""
    (finding,) = discover(model, Sample.of(sample)).findings
    assert finding.found == "traced"
    return finding.id_ranges.get("f")


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
    # It may wrap around.
    "+ that overflows": (lambda self, ids: ids + 1, None),
    "* that overflows int32": (lambda self, ids: (ids % 3_000) * 1_000_000, None),
    "* that does not overflow int64": (lambda self, ids: (ids % 3_000).long() * 1_000_000, (0, 2_999_000_000)),
    "* that overflows int64": (lambda self, ids: (ids % 3_000).long() * 10**16, None),
    "abs of the lowest": (lambda self, ids: ids.abs(), None),
    "a cast that wraps": (lambda self, ids: (ids % 2**31).long().mul(2).int(), (-(2**31), 2**31 - 1)),
    # Nothing is known.
    "the ids themselves": (lambda self, ids: ids, None),
    "fractions": (lambda self, ids: (ids % 10.5).long(), None),
    "floats": (lambda self, ids: (ids.float() % 10).long(), None),
    "other bits": (lambda self, ids: (ids % 10).long().view(torch.int32)[::2], None),
    "in place": (lambda self, ids: (ids % 10).add_(500), None),
    "out": (lambda self, ids: _out(ids % 10), None),
    "+=": (lambda self, ids: _add_to(ids % 10), None),
    "an operator in place": (lambda self, ids: torch.ops.aten.add_.Scalar(ids % 10, 500), None),
    "by code that is not traced": (lambda self, ids: _after(ids % 10, self.shift), None),
    "through a view": (lambda self, ids: _after(ids % 10, lambda same: self.shift(same.view(-1))), None),
    "by a module of torch": (lambda self, ids: _after(ids % 10, self.passes_on), None),
    "before the remainder": (lambda self, ids: _after(ids.clone(), self.shift) % 10, (0, 9)),
    "where by name": (lambda self, ids: torch.where(ids > 0, ids % 10, other=ids), None),
    "abs by name": (lambda self, ids: torch.abs(input=ids.fmod(10)), (0, 9)),
    "flatten by name": (lambda self, ids: torch.flatten(input=ids % 10), (0, 9)),
    "a table of ids that is saved": (lambda self, ids: self.learned[ids % 4], None),
}
# fmt: on


def _add_to(ids: Tensor) -> Tensor:
    same = ids
    same += 500
    return ids


def _after(ids: Tensor, call: Callable[[Tensor], Any]) -> Tensor:
    call(ids)
    return ids


def _set(ids: Tensor) -> Tensor:
    ids[0] = 500
    return ids


def _out(ids: Tensor) -> Tensor:
    torch.add(ids, 500, out=ids)
    return ids


def extremes(dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    near = torch.arange(-40, 41)
    return torch.cat([near, limits.min + torch.arange(60), limits.max - torch.arange(60)]).to(dtype)


def test_nothing_is_known_of_code_that_cannot_be_traced() -> None:
    (finding,) = discover(Model(lambda self, ids: _set(ids % 10)), Sample(batch([1, 2]))).findings
    assert (finding.found, finding.id_ranges) == ("walked", {})


@pytest.mark.parametrize("case", CASES)
def test_a_rule_says_what_torch_does(case: str) -> None:
    change, expected = CASES[case]
    model = Model(change)
    found = range_of(model, batch(extremes(torch.int64)))
    assert (None if found is None else (found.lower, found.upper)) == expected
    for dtype in (torch.int64, torch.int32):
        try:
            seen = change(model, extremes(dtype))
        except RuntimeError as error:
            assert "overflow" in str(error)  # noqa: PT017
            continue
        if found is not None:
            assert found.lower <= int(seen.min())
            assert int(seen.max()) <= found.upper
            if dtype == torch.int64 and case not in _WIDER:
                assert (int(seen.min()), int(seen.max())) == (found.lower, found.upper)  # no wider than it must be


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

    found = range_of(Model(change), batch(extremes(torch.int64)))
    for dtype in (torch.int64, torch.int32):
        try:
            seen = change(None, extremes(dtype))
        except RuntimeError as error:  # a number that int32 does not have
            assert re.search("overflow|ZeroDivision", str(error))  # noqa: PT017
            continue
        if found is not None:
            assert found.lower <= int(seen.min())
            assert int(seen.max()) <= found.upper


def test_the_proof_names_each_step_and_its_line() -> None:
    model = Model(lambda self, ids: (ids % 10 + 5).clamp(max=12))
    found = range_of(model, batch([1, 2]))
    assert (found.lower, found.upper) == (5, 12)
    steps = found.proof.split(", then ")
    assert [step.partition(" (")[0] for step in steps] == ["% 10", "+ 5", "clamp(max=12)"]
    assert all("test_id_ranges.py:" in step for step in steps)


def test_batches_whose_ids_are_no_integers_have_no_ranges() -> None:
    """The remainder of a float may be rounded up to the divisor."""
    model = Model(lambda self, ids: ids % 10)
    found = discover(model, Sample(batch(torch.tensor([1.0, 2.0])))).findings[0].id_ranges
    assert found == {}


class Two(nn.Module):
    """Two features of one batch, and two calls."""

    def __init__(self, second: int | None = None) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=100, feature_names=[feature])
            for name, feature in (("a", "f"), ("b", "g"))
        ]
        self.ebc = EmbeddingBagCollection(tables=tables)
        self.second = second

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        small = KeyedJaggedTensor(features.keys(), features.values() % 50, lengths=features.lengths())
        pooled = self.ebc(small).values()
        if self.second is not None:
            other = KeyedJaggedTensor(features.keys(), features.values() % self.second, lengths=features.lengths())
            pooled = pooled + self.ebc(other).values()
        return pooled


@pytest.mark.parametrize(("second", "upper"), [(None, 49), (30, 49), (70, 69)])
def test_all_features_and_all_calls(second: int | None, upper: int) -> None:
    features = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    (finding,) = discover(Two(second), Sample(features)).findings
    assert {name: (each.lower, each.upper) for name, each in finding.id_ranges.items()} == {
        "f": (0, upper), "g": (0, upper),
    }  # fmt: skip


class OnlyInTraining(Model):
    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        ids = features.values()
        ids = ids % 10 if self.training else ids % 20
        return self.ebc(KeyedJaggedTensor(["f"], ids, lengths=features.lengths())).values()


def test_both_modes() -> None:
    assert str(range_of(OnlyInTraining(lambda self, ids: ids), batch([1]))) == "0 to 19"


@dataclass
class Batch:
    dense: Tensor
    sparse: KeyedJaggedTensor
    more: JaggedTensor


class OfAnObject(Model):
    def forward(self, batch: Batch) -> Tensor:
        ids = torch.cat([batch.sparse.values() % 10, batch.more.values() % 30])
        return self.ebc(KeyedJaggedTensor(["f"], ids, lengths=batch.sparse.lengths() * 2)).values()


def test_fields_of_the_argument() -> None:
    more = JaggedTensor(torch.tensor([5]), lengths=torch.tensor([1]))
    assert str(range_of(OfAnObject(lambda self, ids: ids), Batch(torch.rand(1), batch([1]), more))) == "0 to 29"


def test_a_call_that_is_not_traced_has_no_range() -> None:
    class Branches(Model):
        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            return super().forward(features) if features.values().sum() > 0 else features.values()

    (finding,) = discover(Branches(lambda self, ids: ids % 10), Sample(batch([1]))).findings
    assert finding.id_ranges == {}


def test_shared_by_conversion() -> None:
    converted = recfx.convert(Model(lambda self, ids: ids % 10), (batch([1, 2]),), verify=False)
    (table,) = converted.ebc.tables
    assert str(table.id_range) == "0 to 9"
    assert not table.never_needs_index  # there is none
