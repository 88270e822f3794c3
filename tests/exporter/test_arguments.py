"""How an exported file takes the arguments of the model: by position and by name, whatever they are called."""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx
from tests.support.refusals import refused

FORMATS = ["torchscript", "pt2"]


class TwoTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=10, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[table])

    def forward(
        self,
        features: KeyedJaggedTensor,
        added: torch.Tensor | None = None,
        taken: torch.Tensor | None = None,
        scale: float = 2.0,
    ) -> torch.Tensor:
        pooled = self.ebc(features).values() * scale
        pooled = pooled if added is None else pooled + added
        return pooled if taken is None else pooled - taken


def features(batch_size: int = 3) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.arange(batch_size), lengths=torch.ones(batch_size, dtype=torch.int64))


def exported(model: nn.Module, sample: recfx.Sample, path: Path, format: str) -> tuple[nn.Module, recfx.LoadedModel]:
    converted = recfx.convert(model, sample).eval()
    recfx.export(converted, path / "model", sample, format=format)
    return converted, recfx.load(path / "model")


@pytest.mark.parametrize("format", FORMATS)
def test_arguments_by_position_are_those_of_the_model_whatever_the_order_in_the_sample(
    format: str, tmp_path: Path
) -> None:
    one, two = torch.rand(2, 3, 2)
    sample = recfx.Sample(taken=two, added=one, features=features())
    model, loaded = exported(TwoTensors(), sample, tmp_path, format)
    expected = model(features(), one, two)
    assert torch.allclose(loaded(features(), one, two), expected)
    assert torch.allclose(loaded(features(), one, two, 2.0), expected)
    assert torch.allclose(loaded(features(), taken=two, added=one), expected)


def test_what_the_sample_left_out_may_be_passed_as_it_is_by_default(tmp_path: Path) -> None:
    taken = torch.rand(3, 2)
    model, loaded = exported(TwoTensors(), recfx.Sample(features(), taken=taken), tmp_path, "torchscript")
    assert torch.allclose(loaded(features(), None, taken), model(features(), None, taken))
    for wrong, message in (
        (recfx.Sample(features(), taken, taken), "'added' was not in the sample"),
        (recfx.Sample(features(), taken=taken, scale=3.0), "'scale' was not in the sample"),
        (recfx.Sample(features(), None, taken, taken=taken), "'taken' was passed by position and by name"),
        (recfx.Sample(features(), None, taken, 2.0, 1), "5 arguments were passed; by position, it takes 4"),
        (recfx.Sample(features(), taken=taken, other=1), "no argument 'other'"),
        (recfx.Sample(features()), "taken is missing.* export a second file"),
        (recfx.Sample(features(), None, None), "taken is None.* export a second file"),
        (recfx.Sample(None, taken=taken), "features is None.* export a second file"),
    ):
        with refused("wrong_argument", match=message, error=recfx.InputError):
            loaded(*wrong.args, **wrong.kwargs)


def test_a_constant_of_the_sample_that_is_left_out_is_not_replaced_by_the_one_built_in(tmp_path: Path) -> None:
    model, loaded = exported(TwoTensors(), recfx.Sample(features(), scale=3.0), tmp_path, "torchscript")
    assert torch.allclose(loaded(features(), scale=3.0), model(features(), scale=3.0))
    with pytest.raises(recfx.InputError, match=r"scale is missing; 3\.0 is built in"):
        loaded(features())
    with refused(
        "wrong_argument", match=r"scale is a Tensor, but .* 3\.0.* export a second file", error=recfx.InputError
    ):
        loaded(features(), scale=torch.tensor(3.0))
    with refused("missing_input", match="export a second file", error=recfx.InputError):
        loaded.serve({"features.f.values": torch.arange(3)})


class Scale(float, Enum):
    HALF = 0.5


@pytest.mark.parametrize("scale", [float("nan"), numpy.float64(0.5), Scale.HALF])
def test_a_constant_is_itself_whatever_its_type(scale: float, tmp_path: Path) -> None:
    model, loaded = exported(TwoTensors(), recfx.Sample(features(), scale=scale), tmp_path, "pt2")
    assert torch.allclose(loaded(features(), scale=scale), model(features(), scale=scale), equal_nan=True)


class AnyNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two_tensors = TwoTensors()

    def forward(this, features: KeyedJaggedTensor, self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        for number, value in enumerate([*args, *kwargs.values()], 2):
            self = self + number * value
        return this.two_tensors(features, self)


NAMES = ["answers", "rehearsal", "output", "names", "input", "torch", "NoneType", "__call", "device", "argument_2"]


@pytest.mark.parametrize("format", FORMATS)
def test_names_that_mean_something_in_the_program(format: str, tmp_path: Path) -> None:
    tensors = torch.rand(2, 3, 2)
    sample = recfx.Sample(features(), *tensors, **{name: torch.rand(3, 2) for name in NAMES})
    model, loaded = exported(AnyNames(), sample, tmp_path, format)
    turned = dict(reversed(sample.kwargs.items()))
    assert torch.allclose(loaded(*sample.args, **sample.kwargs), model(*sample.args, **sample.kwargs))
    with refused("wrong_argument", match="in this order", error=recfx.InputError):
        loaded(*sample.args, **turned)


class Projected(TwoTensors):
    """Projects a tensor, which has to be of the weight's dtype and size."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(3, 2)

    def forward(self, features: KeyedJaggedTensor, added: torch.Tensor) -> torch.Tensor:
        return self.ebc(features).values() + self.over(added)


BY_NAME = {"features.f.values": torch.arange(3), "features.f.lengths": torch.ones(3).long()}


@pytest.mark.parametrize("format", FORMATS)
def test_samples_of_a_tensor_are_counted_when_the_model_fails(format: str, tmp_path: Path) -> None:
    model, loaded = exported(Projected(), recfx.Sample(features(), torch.rand(3, 3)), tmp_path, format)
    with refused("wrong_batch_size", match="2 samples in input added and 3 in features", error=recfx.InputError):
        loaded(features(), torch.rand(2, 3))
    with refused("wrong_batch_size", match="2 samples in input added and 3 in features", error=recfx.InputError):
        loaded.serve({**BY_NAME, "added": torch.rand(2, 3)})
    one = torch.rand(1, 3)
    if format == "torchscript":  # the model takes it
        assert torch.allclose(loaded(features(), one), model(features(), one))


def test_a_tensor_unlike_the_sample_is_named_when_the_model_fails(tmp_path: Path) -> None:
    _, loaded = exported(Projected(), recfx.Sample(features(), torch.rand(3, 3)), tmp_path, "torchscript")
    for added, reason, message in (
        (torch.rand(3, 3).double(), "wrong_dtype", r"input added must be float32, got float64\. What to do: convert"),
        (torch.ones(4), "wrong_rank", r"input added must have 2 dimensions, but is \[4\]\. What to do: pass as many"),
        (
            torch.rand(3, 4),
            "wrong_size",
            r"input added of sizes \[3, 4\]; the sample's had \[any, 3\]\. What to do: pass",
        ),
    ):
        with refused(reason, match=message, error=recfx.InputError):
            loaded(features(), added)
        with refused(reason, match=message, error=recfx.InputError):
            loaded.serve({**BY_NAME, "added": added})


class TakesNest(nn.Module):
    """Reads a dict, in a list or as ``**kwargs``, in its order, as its class says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.ebc, self.form = TwoTensors().ebc, form

    def forward(self, features: KeyedJaggedTensor, nested: Any = None, **dense: torch.Tensor) -> torch.Tensor:
        dense = nested[0] if nested else dense
        in_order = {"class": type(dense) is dict, "ordered": isinstance(dense, OrderedDict)}.get(self.form, True)
        first, second = dense.values() if in_order else (dense["one"], dense["two"])
        first = first * 2 if isinstance(dense, OrderedDict) else first
        return self.ebc(features).values() * first + second


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("form", ["dict", "keywords", "class", "ordered"])
def test_the_order_of_a_dict_is_the_samples(form: str, format: str, tmp_path: Path) -> None:
    def call(given: dict[str, torch.Tensor]) -> recfx.Sample:
        return recfx.Sample(features(), **given) if form == "keywords" else recfx.Sample(features(), [given])

    kind = OrderedDict if form == "ordered" else dict
    dense = kind(zip(("one", "two"), torch.rand(2, 3, 2), strict=True))
    reversed_order = call(kind(reversed(dense.items())))
    model, loaded = exported(TakesNest(form), call(dense), tmp_path, format)
    assert torch.allclose(
        loaded(*call(dense).args, **call(dense).kwargs), model(*call(dense).args, **call(dense).kwargs)
    )
    with refused("wrong_argument", match="two, one in this order", error=recfx.InputError):
        loaded(*reversed_order.args, **reversed_order.kwargs)


@dataclass
class Pair:
    one: torch.Tensor
    two: torch.Tensor


class SubclassOfPair(Pair):
    def scale(self) -> float:
        return 3.0


class Named(NamedTuple):
    one: torch.Tensor
    two: torch.Tensor


class OwnDict(dict[str, torch.Tensor]):
    pass


class TakesPair(TwoTensors):
    def forward(self, features: KeyedJaggedTensor, pair: Any) -> torch.Tensor:  # type: ignore[override]
        one, two = pair if isinstance(pair, tuple) else pair.values() if isinstance(pair, dict) else vars(pair).values()
        return self.ebc(features).values() * one + two


def with_attribute(one: torch.Tensor, two: torch.Tensor) -> Pair:
    pair = Pair(one, two)
    pair.temperature = torch.ones(1)  # type: ignore[attr-defined]
    return pair


def in_dict(kind: Any) -> Any:
    return lambda one, two: kind(one=one, two=two)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("sample", "other"),
    [
        (Pair, SubclassOfPair),
        (Pair, with_attribute),
        (Pair, Named),
        (Named, Pair),
        (lambda one, two: (one, two), Named),
        (in_dict(dict), in_dict(OrderedDict)),
        (in_dict(OrderedDict), in_dict(dict)),
        (in_dict(dict), in_dict(OwnDict)),
    ],
)
def test_a_batch_of_another_class_than_the_samples(sample: Any, other: Any, format: str, tmp_path: Path) -> None:
    """The model may ask for the class, or call what only one of them has."""
    one, two = torch.rand(2, 3, 2)
    model, loaded = exported(TakesPair(), recfx.Sample(features(), sample(one, two)), tmp_path, format)
    assert torch.allclose(loaded(features(), sample(one, two)), model(features(), sample(one, two)))
    with refused("wrong_argument", error=recfx.InputError):
        loaded(features(), other(one, two))


class ShiftsItsIds(KeyedJaggedTensor):
    def values(self) -> torch.Tensor:
        return super().values() + 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_kjt_that_answers_by_itself_is_not_taken(format: str, tmp_path: Path) -> None:
    _, loaded = exported(TwoTensors(), recfx.Sample(features(), *torch.rand(2, 3, 2)), tmp_path, format)
    plain = features()
    with refused("wrong_argument", error=recfx.InputError):
        loaded(ShiftsItsIds(plain.keys(), plain.values(), lengths=plain.lengths()), *torch.rand(2, 3, 2))


class Attributes(dict[str, Any]):
    """Its items are its attributes, too, as in many projects' own classes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class ReadsAttributes(TwoTensors):
    def forward(self, features: KeyedJaggedTensor, dense: Any) -> torch.Tensor:  # type: ignore[override]
        pooled: torch.Tensor = self.ebc(features).values()
        return pooled * (dense.a + dense["b"])


@pytest.mark.parametrize("format", FORMATS)
def test_a_dict_of_a_class_of_the_users_is_no_constant_of_the_file(format: str, tmp_path: Path) -> None:
    sample = (features(), Attributes(a=torch.ones(1), b=torch.ones(1)))
    with refused("sample_failed", error=recfx.ExportError):
        recfx.export(recfx.convert(ReadsAttributes()), tmp_path / "model", sample, format=format)


class ReadsWeights(TwoTensors):
    def forward(self, features: KeyedJaggedTensor, other: Any = None) -> torch.Tensor:  # type: ignore[override]
        return self.ebc(features).values() + features["f"].weights().sum()


@pytest.mark.parametrize("format", FORMATS)
def test_missing_weights_are_named_and_jagged_tensors_refused(format: str, tmp_path: Path) -> None:
    weights = torch.rand(3)
    weighted = KeyedJaggedTensor(["f"], torch.arange(3), weights, lengths=torch.ones(3, dtype=torch.int64))
    model, loaded = exported(ReadsWeights(), recfx.Sample(weighted), tmp_path, format)
    assert torch.allclose(loaded(weighted), model(weighted))
    with refused("missing_weights", error=recfx.InputError):
        loaded(features())
    with refused("unsupported_argument", error=recfx.ExportError):
        exported(ReadsWeights(), recfx.Sample(weighted, weighted["f"]), tmp_path, format)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rows_need_not_be_contiguous(dtype: torch.dtype, tmp_path: Path) -> None:
    model = TwoTensors()
    rows = model.ebc.embedding_bags["t"].weight
    rows.data = torch.randn(2, 10).to(dtype).t()
    ids = KeyedJaggedTensor(["f"], torch.arange(10).repeat(3), lengths=torch.tensor([7, 23]))
    _, loaded = exported(model, recfx.Sample(ids), tmp_path, "torchscript")
    of_bags = (rows.double()[:7], rows.double()[[7, 8, 9, *range(10), *range(10)]])
    assert torch.allclose(loaded(ids).double(), torch.stack([bag.sum(0) for bag in of_bags]) * 2, atol=1e-5)


class ReturnsItsBatches(TwoTensors):
    def forward(self, features: KeyedJaggedTensor) -> dict[str, Any]:  # type: ignore[override]
        return {"pooled": self.ebc(features).values(), "features": features}


@pytest.mark.parametrize("format", FORMATS)
def test_batches_that_the_model_returns_are_like_the_samples(format: str, tmp_path: Path) -> None:
    def call(keys: list[str], weights: torch.Tensor | None = None) -> recfx.Sample:
        batch = KeyedJaggedTensor(keys, torch.arange(6), weights, lengths=torch.ones(6, dtype=torch.int64))
        return recfx.Sample(batch)

    _, loaded = exported(ReturnsItsBatches(), call(["f", "g"]), tmp_path, format)
    assert loaded(*call(["f", "g"]).args)["features"].keys() == ["f", "g"]
    with refused("other_features", error=recfx.InputError):
        loaded(*call(["g", "f"]).args)
    with refused("bad_weights", error=recfx.InputError):
        loaded(*call(["f", "g"], torch.rand(6)).args)
