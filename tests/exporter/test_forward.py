"""Files whose ``forward`` takes tensors, by name or by position, and their place in a model repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from tests.exporter.hashed_models import HashedModel, by_name, call, trained


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = trained()

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        output = self.model(dense, features)
        return {"score": output, "best": output.argmax(dim=1)}


@pytest.fixture(scope="module")
def models() -> dict[type[nn.Module], nn.Module]:
    return {HashedModel: trained(), TwoOutputs: TwoOutputs().eval()}


def of(forward: str, inputs: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    return (inputs,) if forward == "tensors" else tuple(inputs.values())


@pytest.mark.parametrize("forward", ["tensors", "positional"])
@pytest.mark.parametrize("made", [HashedModel, TwoOutputs])
def test_forward_takes_what_serve_takes(
    forward: Any, made: type[nn.Module], models: dict[type[nn.Module], nn.Module], tmp_path: Path
) -> None:
    recfx.export(models[made], tmp_path / "model.pt", call(6), forward=forward)
    loaded, script = recfx.load(tmp_path / "model.pt"), torch.jit.load(tmp_path / "model.pt")
    for batch_size in (0, 1, 7, 7, 0):
        sample = call(batch_size, seed=batch_size)
        named = by_name(sample)
        inputs = {name: named[name] for name in loaded.inputs}
        expected = loaded.serve(inputs)
        answers = script(*of(forward, inputs))
        answers = (answers,) if made is HashedModel else answers
        assert isinstance(answers, tuple)
        assert all(torch.equal(answer, wanted) for answer, wanted in zip(answers, expected.values(), strict=True))
        answer = loaded(*sample.args)
        assert torch.equal(answer if made is HashedModel else answer["score"], answers[0])
    with pytest.raises(Exception, match="wrong_rank"):
        script(*of(forward, {**inputs, "dense": torch.ones(7)}))


@pytest.mark.parametrize(("forward", "first"), [("tensors", "dense"), ("positional", "INPUT__0")])
def test_a_model_repository(forward: Any, first: str, models: dict[type[nn.Module], nn.Module], tmp_path: Path) -> None:
    for _ in range(2):
        path = tmp_path / "ranker.pt"
        recfx.export(models[TwoOutputs], path, call(6), forward=forward, model_repository=tmp_path / "repository")
    folder = tmp_path / "repository" / "ranker"
    assert sorted(entry.name for entry in folder.iterdir()) == ["1", "2", "config.pbtxt"]
    assert (folder / "2" / "model.pt").read_bytes() == path.read_bytes()
    lines = (folder / "config.pbtxt").read_text().splitlines()
    named = "" if forward == "tensors" else "  # dense"
    assert lines[:3] == ['name: "ranker"', 'backend: "pytorch"', "max_batch_size: 0"]
    assert f'input [ {{ name: "{first}" data_type: TYPE_FP32 dims: [ -1, 1 ] }} ]{named}' in lines
    assert len([line for line in lines if line.startswith("input") and "TYPE_INT64 dims: [ -1 ]" in line]) == 8
    assert lines[-2:] == [
        'output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]  # output.score',
        'output [ { name: "OUTPUT__1" data_type: TYPE_INT64 dims: [ -1 ] } ]  # output.best',
    ]


@pytest.mark.parametrize(
    "options",
    [{"forward": "tensor"}, {"forward": "tensors", "format": "pt2"}, {"model_repository": "repository"}],
    ids=str,
)
def test_what_has_no_such_form(
    options: dict[str, Any], models: dict[type[nn.Module], nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(recfx.ExportError, match="invalid_argument"):
        recfx.export(models[HashedModel], tmp_path / "model.pt", call(6), **options)
    assert not list(tmp_path.iterdir())
