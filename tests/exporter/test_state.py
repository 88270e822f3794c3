"""What calls of a model change: files keep buffers, and nothing else may change."""

import copy
import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

import recfx
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.support.needs import NEEDS_PT2
from tests.support.refusals import refused


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection(4)
        self.prepare()

    def prepare(self) -> None: ...


class _Object:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


class _Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, _: KeyedJaggedTensor) -> Tensor:
        self.steps.add_(1)
        return self.steps


class _OfClass(_Model):
    calls = 0


def _in_place(model: Any, _: KeyedJaggedTensor) -> Tensor:
    return model.state.add_(1)


def _replaced(model: Any, _: KeyedJaggedTensor) -> Any:
    model.state = model.state + 1
    return model.state


def _item_in_place(model: Any, _: KeyedJaggedTensor) -> Any:
    model.state[0] += 1
    return model.state[0]


def _item_replaced(model: Any, _: KeyedJaggedTensor) -> Any:
    model.state[0] = model.state[0] + 1
    return model.state[0]


def _part_of_a_buffer(model: Any, _: KeyedJaggedTensor) -> Tensor:
    model.buffer.add_(1)
    return model.state


def _data_of_a_buffer(model: Any, features: KeyedJaggedTensor) -> Tensor:
    """Exchanges a buffer's memory, which the sample's ids leave as it was."""
    model.buffer.data = torch.where((features.values() > 40).any(), model.buffer + 1, model.buffer)
    return model.buffer[0]


def _of_class(model: Any, _: KeyedJaggedTensor) -> int:
    type(model).calls += 1
    return model.calls


def _of_collection(model: Any, _: KeyedJaggedTensor) -> int:
    model.ebc.counted = getattr(model.ebc, "counted", 0) + 1
    return int(model.ebc.counted)


def _of_dict(model: Any, _: KeyedJaggedTensor) -> int:
    model.__dict__["state"] += 1
    return int(model.__dict__["state"])


def _of_one_sample(model: Any, features: KeyedJaggedTensor) -> int:
    model.state += features.stride() == 1
    return int(model.state)


_all_calls = _Object()
_all_seen: dict[str, Tensor] = {}
_counter = functools.partial(lambda counts: next(counts), itertools.count())

STEPS: dict[str, tuple[Callable[[], Any], Callable[[Any, KeyedJaggedTensor], Any]]] = {
    "a parameter": (lambda: nn.Parameter(torch.zeros(()), requires_grad=False), _in_place),
    "a tensor": (lambda: torch.zeros(()), _in_place),
    "another tensor": (lambda: torch.zeros(()), _replaced),
    "a number": (lambda: 0, _replaced),
    "a tensor in a list": (lambda: [torch.zeros(())], _item_in_place),
    "another tensor in a dict": (lambda: {0: torch.zeros(())}, _item_replaced),
    "a module of TorchScript": (lambda: torch.jit.script(_Adds()), lambda model, features: model.state(features)),
    "a part of a buffer": (lambda: None, _part_of_a_buffer),
    "the data of a buffer": (lambda: None, _data_of_a_buffer),
    "an iterator": (itertools.count, lambda model, _: next(model.state)),
    "bytes": (lambda: bytearray(1), _item_in_place),
    "random numbers": (lambda: random.Random(1), lambda model, _: int(model.state.random() * 20)),
    "an object": (_Object, lambda model, _: model.state()),
    "a closure": (lambda: _counter, lambda model, _: model.state()),
    "the module's own dict": (lambda: 0, _of_dict),
    "on a collection": (lambda: 0, _of_collection),
    "a global": (lambda: 0, lambda *_: _all_calls()),
    "of a class": (lambda: 0, _of_class),
    "only other batches": (lambda: 0, _of_one_sample),
}


class _Steps(_OfClass):
    def __init__(self, kept: str) -> None:
        super().__init__()
        state, self.step = STEPS[kept]
        self.register_buffer("buffer", torch.zeros(2))
        self.state: Any = self.buffer[:1] if kept == "a part of a buffer" else state()

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.ebc(features).values() * (1 + (self.step(self, features) > 100))


@pytest.mark.parametrize("kept", STEPS)
def test_what_is_no_buffer_of_its_own_must_not_change(kept: str, tmp_path: Path) -> None:
    """It is noticed before it shows in an answer."""
    model = _Steps(kept).eval()
    before = repr(model.state_dict()), repr(model.state)
    with refused("changes_state", error=recfx.ExportError):
        recfx.export(model, tmp_path / "model", (batch(4),))
    if isinstance(model.state, (int, list, dict, Tensor, nn.Module)):
        assert (repr(model.state_dict()), repr(model.state)) == before
    assert not list(tmp_path.iterdir())


class _Explores(_Model):
    """A branch that hardly any call takes, so that no comparison of answers would see it."""

    def prepare(self) -> None:
        self.draw: Callable[[], float] = lambda: 1.0

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.ebc(features).values()
        return pooled + 100 if self.draw() < 1e-9 else pooled


@pytest.mark.parametrize("format", ["torchscript", pytest.param("pt2", marks=NEEDS_PT2)])
@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: numpy.random.rand()])
def test_random_numbers_that_a_file_cannot_draw(draw: Callable[[], float], format: str, tmp_path: Path) -> None:
    model = _Explores().eval()
    model.draw = draw
    with refused("changes_state", match="random", error=recfx.ExportError):
        recfx.export(model, tmp_path / "model", (batch(4),), format=format)


class _LeavesBehind(_Model):
    """What later calls do not read is no state."""

    def prepare(self) -> None:
        self.seen = [torch.zeros(())]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.ebc(features).values()
        self.loss = pooled.mean()
        self.seen[0] = _all_seen["pooled"] = pooled
        return pooled + self.loss


@dataclass
class _Both:
    features: KeyedJaggedTensor


class _Counts(_Model):
    """Counts what the sample has none of, in a way that no comparison of outputs would see."""

    def prepare(self) -> None:
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("great", torch.zeros((), dtype=torch.int64))

    def forward(self, both: _Both) -> Tensor:
        self.steps += 1
        self.great += (both.features.values() == 3).sum()
        return self.ebc(both.features).values() * (1 + self.great) * (self.steps - 10).clamp(0, 1)


class _Mean(nn.Module):
    """Puts another tensor into the place of a buffer, which no trace keeps, but TorchScript does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, pooled: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + pooled.mean()
        return pooled - self.mean


class _Averages(_Model):
    def prepare(self) -> None:
        self.running = _Mean()

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.running(self.ebc(features).values())


class _Assigns(_Model):
    """Puts another tensor into the place of a buffer, which has the same value unless an id is great."""

    def prepare(self) -> None:
        self.register_buffer("great", torch.zeros(()))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        self.great = torch.where((features["f1"].values() > 2).any(), self.great + 1, self.great)
        return self.ebc(features).values() * (1 + self.great)


class _OfTable(_Model):
    """A buffer that is some rows of a table, and changes."""

    def prepare(self) -> None:
        self.register_buffer("rows", next(self.ebc.parameters()).detach()[1:3])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        self.rows.mul_(1.25)
        return self.ebc(features).values()


@NEEDS_PT2
@pytest.mark.parametrize("format", ["torchscript", "pt2"])
def test_plain_tensors_of_the_root_are_in_the_file(format: Any, tmp_path: Path) -> None:
    class Scaled(_Model):
        of_class = torch.full((3,), 2.0)

        def prepare(self) -> None:
            self.scale = torch.tensor([1.0, 2.0, 3.0])
            self.inner = nn.Identity()
            self.inner.scale = torch.tensor(5.0)
            self.register_buffer("inner_scale", torch.tensor(7.0))

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            sums = self.ebc(features).values()[:, :3] * self.scale * self.of_class
            return sums * self.inner.scale + self.inner_scale

    model = recfx.convert(Scaled()).eval()
    recfx.export(model, tmp_path / "model.pt", (batch(3),), format=format)
    other = batch(5)
    assert torch.equal(recfx.load(tmp_path / "model.pt")(other), model(other))


def test_a_buffer_that_is_rows_of_a_table_must_not_change(tmp_path: Path) -> None:
    features = KeyedJaggedTensor(["f1", "f2", "f3"], torch.ones(3).long(), lengths=torch.ones(3).long())
    with refused("changes_state", error=recfx.ExportError):
        recfx.export(recfx.convert(_OfTable()).eval(), tmp_path / "model", (features,))


def test_a_buffer_that_is_assigned_is_not_forgotten(tmp_path: Path) -> None:
    features = [
        KeyedJaggedTensor(["f1", "f2", "f3"], torch.full((3,), id), lengths=torch.ones(3).long()) for id in (1, 3)
    ]
    model = _Assigns().eval()
    with refused("untraceable_root"):
        recfx.convert(model, (features[0],), whole_graph=True)
    for format, reason in (("pt2", "not_exportable"), ("torchscript", "not_scriptable")):
        with refused(reason, match="great", error=recfx.ExportError):
            recfx.export(model, tmp_path / "model", (features[0],), format=format)


@pytest.mark.parametrize("kind", [_LeavesBehind, _Counts, _Averages])
def test_files_change_their_buffers_as_models_do(kind: type[_Model], tmp_path: Path) -> None:
    def call(low: int, high: int) -> Any:
        values = torch.arange(6) % (high - low) + low
        features = KeyedJaggedTensor(["f1", "f2", "f3"], values, lengths=torch.tensor([1, 2, 0, 1, 1, 1]))
        return _Both(features) if kind is _Counts else features

    model = kind().eval()
    standard = copy.deepcopy(model)
    report = recfx.export(recfx.convert(model), tmp_path / "model", (call(0, 3),))
    assert [note.path for note in report.notes if note.code == "keeps_state"] == {
        _Counts: ["steps"],
        _Averages: ["running.mean"],
    }.get(kind, [])
    loaded = recfx.load(tmp_path / "model")
    with torch.no_grad():
        for number in range(14):
            sample = call(number % 2, 4)
            torch.testing.assert_close(loaded(sample), standard(sample))


class _NotesGreatIds(nn.Module):
    """Cannot be traced, and keeps whether there are many ids."""

    def __init__(self) -> None:
        super().__init__()
        self.many = False

    def forward(self, lengths: Tensor) -> Tensor:
        self.many = bool((lengths > 2).any())
        return lengths.sum().float()


class _ReadsTheNote(_Model):
    def prepare(self) -> None:
        self.note = _NotesGreatIds()

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled: Tensor = self.ebc(features).values() * self.note(features["f1"].lengths())
        return pooled * 2 if self.note.many else pooled


def test_an_attribute_that_a_submodule_assigns_is_not_that_of_the_sample(tmp_path: Path) -> None:
    few = KeyedJaggedTensor(["f1", "f2", "f3"], torch.ones(1).long(), lengths=torch.tensor([1, 0, 0]))
    with refused("not_scriptable", match="many", error=recfx.ExportError):
        recfx.export(_ReadsTheNote().eval(), tmp_path / "model", (few,))
