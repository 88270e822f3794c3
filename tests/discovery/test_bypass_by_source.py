"""Code that reads what leads to the model: what its source shows to call nothing is noted, anything else is refused."""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import recfx
from recfx.collections.pooled import HashEmbeddingBagCollection
from tests.builders.batches import batch

FILE = """
import weakref

from torch import nn

from tests.builders.collections import collection

HELD = {"dim": 24, "nothing": None}


class Application:
    steps = 0
    model = None

    def __init__(self):
        self.models = []

    @property
    def found(self):
        return self.model.ebc

    def find(self):
        return self.model.ebc


class Overrides(Application):
    def __getattribute__(self, name):
        return 0 if name == "steps" else super().__getattribute__(name)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)


class Counted(list):
    def __len__(self):
        return 1


APPLICATION, OVERRIDES, COUNTED = Application(), Overrides(), Counted()


def find(model):
    return model.instances[0].ebc


ELSEWHERE = {"__name__": "another_users_file"}
exec("HELD = {'count': len}\\ndef count(): return HELD['count']([])", ELSEWHERE)
count = ELSEWHERE["count"]


def last():
    return each.ebc


def find_and_count(model, find=lambda model: model.instances[0].ebc): return find(model), len(model.instances)


class Model(nn.Module):
    instances = []
    alive = weakref.WeakSet()

    def __init__(self):
        super().__init__()
        self.ebc = collection()
        self.over = nn.Linear(24, 1)
        HELD["module"] = APPLICATION.model = OVERRIDES.model = self
        for each in (self.instances, APPLICATION.models, COUNTED):
            each.append(self)
        self.alive.add(self)
        HELD["inner"] = {"scale": 1.0, "module": self}

    def forward(self, features):
        found = n = None
        <CODE>
        return self.over((found or self.ebc)(features).values())
"""


def _module_with(code: str, path: Path) -> types.ModuleType:
    path.write_text(FILE.replace("<CODE>", code.replace("\n", "\n" + " " * 8)))
    spec = importlib.util.spec_from_file_location("users_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "users_file.py"


NOTED = [
    "n = len(HELD)",
    "n = len(HELD) + count()",
    "n = len(self.instances)",
    "n = len(Model.instances)",
    "n = len(type(self).instances)",
    "n = len(self.alive)",
    "n = len(APPLICATION.models)",
    "n = self in self.instances",
    "n = 'module' not in HELD",
    "n = HELD is None",
    "n = HELD['nothing'] is None",
    "n = None is not APPLICATION.model",
    "n = sum(1 for _ in self.instances)",
    "for _ in self.instances:\n    n = 1",
    "if HELD:\n    n = 1",
    "n = 0 if not self.instances else 1",
    "n = HELD['dim'] + HELD['inner']['scale']",
    "n = APPLICATION.steps",
    "APPLICATION.steps += len(self.instances)",
    "APPLICATION.models += [self]",
    "HELD['last'] = self",
    "HELD[n] = self",
    "HELD['dim'] += 0",
    "del self.instances[1:]",
    "self.instances.append(self)",
    "self.alive.add(self)",
    "HELD.setdefault('last', self)",
]

REFUSED = [
    "found = HELD['module'].ebc",
    "found = HELD['inner']['module'].ebc",
    "found = HELD[str('module')].ebc",
    "found = HELD.get('module').ebc",
    "found = HELD['nothing']",
    "held = HELD\nfound = held['module'].ebc",
    "n = len(HELD)\nfound = HELD['module'].ebc",
    "found = max(HELD.values(), key=id)",
    "found = HELD.setdefault('module', self).ebc",
    "found = (lambda held=HELD: held['module'].ebc)()",
    "found = (lambda: HELD['module'].ebc)()",
    "len = lambda held: held['module'].ebc\nfound = len(HELD)",
    "found = [len(HELD) for len in [lambda held: held['module'].ebc]][0]",
    "HELD['module'] += 0",
    "HELD.update(module=HELD['module'])",
    "found = self.instances[0].ebc",
    "found = type(self).instances[-1].ebc",
    "found = Model.instances[0].ebc",
    "found = self.instances and self.instances[0].ebc",
    "found = [_ for _ in self.instances][0].ebc",
    "for _ in self.instances:\n    n = 1\nfound = _.ebc",
    "global each\nfor each in self.instances:\n    n = 1\nfound = last()",
    "for found in self.alive:\n    found = found.ebc",
    "n = len(self.instances)\nfound = find(self)",
    "n = len(self.instances)\nfound, n = find_and_count(self)",
    "n = len(self.instances)\nfound = getattr(self, 'instances')[0].ebc",
    "found = APPLICATION.model.ebc",
    "found = APPLICATION.models[0].ebc",
    "found = APPLICATION.found",
    "found = APPLICATION.find()",
    "n = HELD == self",
    "n = HELD in [None]",
    "n = len(COUNTED)",
    "n = OVERRIDES.steps",
    "OVERRIDES.steps = 1",
    "print(HELD)",
]


@pytest.mark.parametrize("code", NOTED)
def test_what_takes_nothing_to_call_is_noted(code: str, file: Path) -> None:
    model, features = _module_with(code, file).Model(), batch(5)
    before = model(features)
    for sample in (None, (features,)):
        converted = recfx.convert(model, sample)
        assert isinstance(converted.ebc, HashEmbeddingBagCollection)
        torch.testing.assert_close(converted(features), before)
        (note,) = [each for each in recfx.explain(converted).reasons if each.code == "bypass_not_called"]
        assert (note.path, note.severity) == ("ebc", "info")
        assert "is also reached by" in note.message
    dry = recfx.explain(model)
    assert dry.ok
    assert "bypass_not_called" in {each.code for each in dry.reasons}


@pytest.mark.parametrize("code", REFUSED)
def test_what_may_call_is_refused(code: str, file: Path) -> None:
    _assert_refused(_module_with(code, file).Model())


def _assert_refused(model: Any) -> None:
    with pytest.raises(recfx.ConversionError, match="is also reached by") as caught:
        recfx.convert(model)
    assert (caught.value.reason, caught.value.module_path) == ("bypassed_collection", "ebc")


def test_a_class_attribute_that_no_code_names_is_refused(file: Path) -> None:
    """Such as one that is called by what has no source."""
    module = _module_with("n = APPLICATION.steps", file)
    model = module.Model()
    recfx.convert(model)
    module.Application.lookup = model.ebc
    _assert_refused(model)


def test_what_is_called_len_but_is_another_function_is_refused(file: Path) -> None:
    module = _module_with("n = len(HELD)", file)
    module.len = lambda held: held["module"].ebc  # type: ignore[attr-defined]
    _assert_refused(module.Model())


def test_code_whose_source_is_gone_or_is_another_one_by_now_is_refused(file: Path) -> None:
    module = _module_with("n = len(HELD)", file)
    recfx.convert(module.Model())
    # The same lines and names, but not what runs.
    calling = _module_with("found = HELD['module'].ebc", file).Model()
    _module_with("n = len(HELD)", file)
    _assert_refused(calling)
    file.unlink()
    _assert_refused(module.Model())
