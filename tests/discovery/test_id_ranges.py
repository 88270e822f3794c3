"""Value ranges of ids through a whole model: the proof, features, calls, modes, and what cannot be traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor

import recfx
from recfx.discovery.discover import discover
from recfx.discovery.sample import Sample
from tests.discovery.models_of_ids import Model, batch, extremes, range_of


def test_the_proof_names_each_step_and_its_line() -> None:
    model = Model(lambda self, ids: (ids % 10 + 5).clamp(max=12))
    id_range = range_of(model, batch([1, 2]))
    assert (id_range.lower, id_range.upper) == (5, 12)
    steps = id_range.proof.split(", then ")
    assert [step.partition(" (")[0] for step in steps] == ["% 10", "+ 5", "clamp(max=12)"]
    assert all("test_id_ranges.py:" in step for step in steps)


def test_batches_whose_ids_are_no_integers_have_no_ranges() -> None:
    """The remainder of a float may be rounded up to the divisor."""
    model = Model(lambda self, ids: ids % 10)
    id_ranges = discover(model, Sample(batch(torch.tensor([1.0, 2.0])))).findings[0].id_ranges
    assert id_ranges == {}


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
    assert {name: (id_range.lower, id_range.upper) for name, id_range in finding.id_ranges.items()} == {
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


# fmt: off
CHANGED: dict[str, Callable[[Any, Tensor], Any]] = {
    "in place": lambda self, ids: (ids % 10).add_(500),
    "out": lambda self, ids: _out(ids % 10),
    "+=": lambda self, ids: _add_to(ids % 10),
    "an operator in place": lambda self, ids: torch.ops.aten.add_.Scalar(ids % 10, 500),
    "by code that is not traced": lambda self, ids: _after(ids % 10, self.shift),
    "through a view": lambda self, ids: _after(ids % 10, lambda same: self.shift(same.view(-1))),
    "by a module of torch": lambda self, ids: _after(ids % 10, self.passes_on),
}
# fmt: on


@pytest.mark.parametrize("case", CHANGED)
def test_nothing_is_known_of_ids_that_may_be_changed_in_place(case: str) -> None:
    model = Model(CHANGED[case])
    assert range_of(model, batch(extremes(torch.int64))) is None
    for dtype in (torch.int64, torch.int32):
        assert int(CHANGED[case](model, extremes(dtype)).max()) > 9  # they are no remainders any more


def test_what_comes_after_the_change_is_known() -> None:
    id_range = range_of(Model(lambda self, ids: _after(ids.clone(), self.shift) % 10), batch(extremes(torch.int64)))
    assert str(id_range) == "0 to 9"


def test_nothing_is_known_of_code_that_cannot_be_traced() -> None:
    (finding,) = discover(Model(lambda self, ids: _set(ids % 10)), Sample(batch([1, 2]))).findings
    assert (finding.found, finding.id_ranges) == ("walked", {})


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
