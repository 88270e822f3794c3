"""What ``verify`` says where nothing, or not everything, can be compared."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.models.verify_report import DIFFERENT, EQUAL, NOT_REPRODUCIBLE, SKIPPED
from recfx.optim.attached import attached_optimizers
from tests.builders.batches import two_bags
from tests.builders.collections import one_table
from tests.builders.optimizers import attach
from tests.support.refusals import refused

HASHED = recfx.HashConfig(dense_rows=0)
EVICT = recfx.HashConfig(dense_rows=0, buckets=1, on_full="evict")


class Model(nn.Module):
    def __init__(self, times: int = 1, rows: int = 10) -> None:
        super().__init__()
        self.ebc, self.times = one_table(rows=rows), times
        self.part: Any = None

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.cat([self.ebc(features).values() for _ in range(self.times)])


def said(report: recfx.VerifyReport, status: str) -> set[tuple[str, str, str]]:
    return {(check.what, check.where, check.message) for check in report.of(status)}


class Uncopied:
    def __deepcopy__(self, memo: object) -> object:
        raise TypeError("not twice")


def test_a_model_that_cannot_be_copied() -> None:
    model = Model()
    converted = recfx.convert(model)
    converted.part = Uncopied()
    report = recfx.verify(model, converted, (two_bags(1, 2),))
    assert said(report, SKIPPED) == {("run", "copy", "the model cannot be copied (TypeError: not twice)")}
    assert len(report.checks) == 4
    assert not report.ok


@pytest.mark.parametrize("times", [1, 2])
def test_ids_that_may_be_admitted_between_calls(times: int) -> None:
    model = Model(times)
    sample = (two_bags(1, 2, 1),)
    converted = recfx.convert(model, sample, hashing=recfx.HashConfig(dense_rows=0, admit_after=2))
    report = recfx.verify(model, converted, sample)
    skipped = {(check.mode, check.what, check.where) for check in report.of(SKIPPED)}
    assert skipped == (set() if times == 1 else {("train", "run", "hash_ids")})
    assert {check.mode for check in report.of(EQUAL)} == ({"train", "eval"} if times == 1 else {"eval"})
    assert all("ids may be admitted between the calls" in check.message for check in report.of(SKIPPED))


def test_a_full_table_is_a_refusal_with_advice() -> None:
    model = Model(rows=2)
    converted = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0, buckets=1))
    report = recfx.verify(model, converted, (two_bags(10**12, 10**12 + 1, 10**12 + 2),))
    differing = {(check.mode, check.what, check.where, check.status) for check in report.of(DIFFERENT)}
    assert differing == {("train", "run", "refused_sample", DIFFERENT)}
    assert {check.mode for check in report.of(EQUAL)} == {"eval"}
    assert all("table_full" in check.message or "full" in check.message for check in report.of(DIFFERENT))


def test_a_batch_of_unknown_size_is_compared_once() -> None:
    sample = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]), stride_per_key_per_rank=[[2]])
    model = Model()
    report = recfx.verify(model, recfx.convert(model), (sample,))
    assert report.ok
    assert {(check.mode, check.batch) for check in report.of(EQUAL)} == {("train", "sample"), ("eval", "sample")}
    assert said(report, SKIPPED) == {("run", "sample", "the sample's batch size is unknown")}
    assert {(check.mode, check.batch) for check in report.of(SKIPPED)} == {
        ("train", "sample + 1"),
        ("eval", "sample + 1"),
    }


def test_a_model_on_meta() -> None:
    model = Model()
    converted = recfx.convert(copy.deepcopy(model).to("meta"))
    for sample in (two_bags(1, 2), two_bags(1, 2).to(torch.device("meta"))):
        report = recfx.verify(model, converted, (sample,), rtol=0.5, atol=0.25)
        assert [(check.what, check.where, check.status) for check in report.checks] == [("run", "meta", SKIPPED)]
        assert "nothing can be computed" in report.checks[0].message
        assert (report.rtol, report.atol) == (0.5, 0.25)


@pytest.mark.parametrize("frozen", [True, False])
def test_an_evicting_table_takes_the_step_of_any_other(frozen: bool) -> None:
    model = Model().requires_grad_(not frozen)
    converted = recfx.convert(model, hashing=EVICT)
    before = converted.ebc.weight("t").detach().clone()
    report = recfx.verify(model, converted, (two_bags(1, 2, 7),))
    assert report.ok
    assert {check.what for check in report.of(EQUAL)} >= {"outputs", "parameters"}
    assert ("gradients" in {check.what for check in report.checks}) == (not frozen)
    assert torch.equal(converted.ebc.weight("t"), before)
    assert not attached_optimizers(converted.ebc.weight("t"))


@pytest.mark.parametrize("hashing", [None, HASHED, EVICT], ids=["adopted", "hashed", "evicting"])
def test_what_differs_from_itself_is_found_out_in_every_mode(hashing: recfx.HashConfig | None) -> None:
    generator = torch.Generator()

    class Noisy(Model):
        def forward(self, features: KeyedJaggedTensor) -> Any:
            output = super().forward(features)
            return output, output.detach() + torch.rand((), generator=generator)

    model = Noisy()
    attach(model.ebc, torch.optim.Adagrad)
    converted = recfx.convert(model, hashing=hashing)
    converted(two_bags(1, 2, 7))[0].sum().backward()
    report = recfx.verify(model, converted, (two_bags(1, 2, 5),))
    assert report.ok, [str(check) for check in report.of(DIFFERENT)]
    assert {(check.mode, check.batch) for check in report.of(NOT_REPRODUCIBLE)} == {
        (mode, size) for mode in ("train", "eval") for size in ("sample", "sample + 1")
    }
    assert said(report, NOT_REPRODUCIBLE) == {("outputs", "1", "the original differs from itself under one seed")}


def test_a_sharded_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    converted = recfx.convert(model)
    monkeypatch.setattr(HashEmbeddingBagCollection, "is_sharded", True)
    for pair in ((model, converted), (converted, model)):
        with refused("sharded_model", "ebc"):
            recfx.verify(*pair, (two_bags(1, 2),))
