"""What a model returns comes out of its file as it was, or the model is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor, KeyedTensor

import recfx
from tests.support.refusals import refused

FORMATS = ["torchscript", "pt2"]


class Returns(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor, KeyedJaggedTensor], Any]) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=10, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[table])
        self.make = make

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.make(self.ebc(features).values(), features)


def batch(size: int = 3, is_weighted: bool = False) -> KeyedJaggedTensor:
    weights = torch.rand(size) if is_weighted else None
    return KeyedJaggedTensor(["f"], torch.arange(size), weights, lengths=torch.ones(size, dtype=torch.int64))


def export(make: Callable[..., Any], path: Path, format: str, is_weighted: bool = False) -> recfx.LoadedModel:
    sample = batch(is_weighted=is_weighted)
    converted = recfx.convert(Returns(make), sample, verify=False)
    recfx.export(converted, path / "model", sample, format=format)
    return recfx.load(path / "model")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda values, _: (values, values.shape[0]), r"output\.1 of the model is 3 for the sample, and 4 for a b"),
        (lambda values, _: {"n": {"b": values.size(0)}, "v": values}, r"output\.n\.b of the model is 3"),
        (lambda values, _: {"a.b": values, "a": {"b": values + 1}}, r"would be 'output\.a\.b'"),
        (lambda values, batch: (values, batch.values().numel() > 0), "True for the sample, and False for a batch"),
        (lambda values, batch: (values, (batch.values() > 99).sum().item()), "reads from a tensor"),
        (lambda values, _: JaggedTensor(values, offsets=torch.tensor([1, 2, 3])), "a JaggedTensor"),
        (lambda values, _: KeyedTensor(["x"], [len(values)], values, key_dim=0), "a KeyedTensor"),
        (lambda values, _: {"n": 3}, "no tensor"),
        (lambda values, _: None, "no tensor"),
        (lambda values, _: values.shape, "no tensor"),
        (lambda values, batch: {str(number): values for number in range(batch.stride())}, "something else in output"),
    ],
)
def test_answers_that_a_file_would_not_give(
    make: Callable[..., Any], message: str, format: str, tmp_path: Path
) -> None:
    with refused("unsupported_output", match=message, error=recfx.ExportError):
        export(make, tmp_path, format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", FORMATS)
def test_weights_in_an_answer_are_kept(format: str, tmp_path: Path) -> None:
    loaded = export(lambda values, batch: (values, batch, batch["f"]), tmp_path, format, is_weighted=True)
    sent = batch(5, is_weighted=True)
    _, features, jagged = loaded(sent)
    for returned in (features, jagged):
        assert torch.equal(returned.weights(), sent.weights())
        assert torch.equal(returned.values(), sent.values())
        assert torch.equal(returned.lengths(), sent.lengths())


class DependsOnTheBatch(Returns):
    """Answers some batches in another way."""

    def __init__(self, is_other: Callable[[KeyedJaggedTensor], bool]) -> None:
        super().__init__(lambda values, _: values)
        self.is_other = is_other

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        if self.is_other(features):
            return torch.full([features.stride(), 2], 7.0)
        return super().forward(features)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("is_other", "name"),
    [
        (lambda features: features.values().numel() == 0, "a batch without ids"),
        (lambda features: features.stride() == 1, "a batch of one"),
    ],
)
def test_batches_whose_sizes_torch_takes_to_be_greater_are_compared(
    is_other: Callable[[KeyedJaggedTensor], bool], name: str, tmp_path: Path
) -> None:
    sample = batch()
    converted = recfx.convert(DependsOnTheBatch(is_other), sample, verify=False)
    with pytest.raises(recfx.ExportError, match=f"for {name}, the file answers differently"):
        recfx.export(converted, tmp_path / "model", sample, format="pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", FORMATS)
def test_lists_and_tuples_stay_what_they_are(format: str, tmp_path: Path) -> None:
    def make(values: torch.Tensor, _: KeyedJaggedTensor) -> Any:
        return [values, values > 0], (values, [(values * 2).long()]), {"a": (values, values)}

    def kinds(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kinds(item) for key, item in value.items()}
        return torch.Tensor if isinstance(value, torch.Tensor) else (type(value), [kinds(item) for item in value])

    returned = export(make, tmp_path, format)(batch())
    assert kinds(returned) == kinds(make(torch.zeros(1), batch()))


class BranchesOnData(Returns):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled * 2 if pooled.sum() > 0 else pooled


def test_branches_on_data_around_collections_are_refused_with_their_line(tmp_path: Path) -> None:
    converted = recfx.convert(BranchesOnData(lambda values, _: values), batch(), verify=False)
    with refused("not_scriptable", match=r"control flow \(at \S+test_returns.py:\d+\)", error=recfx.ExportError):
        recfx.export(converted, tmp_path / "model", batch())
    assert list(tmp_path.iterdir()) == []
