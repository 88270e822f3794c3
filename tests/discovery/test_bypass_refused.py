"""Collections that a model reaches where nothing can be replaced are refused by name, unless a sample clears them."""

from __future__ import annotations

import contextvars
import importlib.util
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.collections.pooled import HashEmbeddingBagCollection
from tests.builders.batches import batch
from tests.discovery.reaching import TARGETS, Helper, Reaching
from tests.support.refusals import refused

HELD: dict[str, Any] = {}
HELD_IN_CONTEXT: contextvars.ContextVar[nn.Module] = contextvars.ContextVar("held")


class Registry:
    """A class of which nobody makes an instance."""

    module: Any = None


def _held_lookup(features: KeyedJaggedTensor) -> Any:
    return HELD["module"](features)


class ReadsGlobal(Reaching):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(HELD["module"](features).values())


class CallsGlobalFunction(Reaching):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.find(features).values())

    def find(self, features: KeyedJaggedTensor) -> Any:
        return next(_held_lookup(batch_of_ids) for batch_of_ids in [features])


class ReadsRegistry(Reaching):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(Registry.module(features).values())


class ReadsItsClass(Reaching):
    shared: Any = []  # noqa: RUF012

    @property
    def first_shared(self) -> Any:
        return self.shared[0]

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.first_shared(features).values())


class ReadsContext(Reaching):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(HELD_IN_CONTEXT.get()(features).values())


def _local_class(model: Reaching) -> None:
    module = model.block

    class Local(Reaching):
        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return self.over(module(features).values())

    model.__class__ = Local


def _class_with_a_default(model: Reaching) -> None:
    class Local(Reaching):
        def forward(self, features: KeyedJaggedTensor, module: Any = model.block.ebc) -> torch.Tensor:
            return self.over(module(features).values())

    model.__class__ = Local


def _generator(model: Reaching) -> None:
    def endless(module: nn.Module) -> Iterator[Any]:
        features = yield
        while True:
            features = yield module(features)

    running = endless(model.block)
    next(running)
    model.lookup = running.send  # type: ignore[method-assign]


def _iterator(model: Reaching) -> None:
    lookups = iter([model.block.ebc] * 100)
    model.lookup = lambda features: next(lookups)(features)  # type: ignore[method-assign]


def _weakly_held_helper(model: Reaching) -> None:
    helper = Helper(model.block)
    HELD["helper"] = helper
    reference = weakref.ref(helper)
    model.lookup = lambda features: reference()(features)  # type: ignore[misc, method-assign]


def _in_globals(kind: type[Reaching]) -> Callable[[Reaching], None]:
    def way(model: Reaching) -> None:
        model.__class__ = kind
        HELD["module"] = Registry.module = model.block
        ReadsItsClass.shared[:] = [model.block.ebc]

    return way


FIXED: dict[str, tuple[Callable[[Reaching], None], str]] = {
    "global": (_in_globals(ReadsGlobal), r"global 'HELD', which ReadsGlobal\.forward reads"),
    "function_of_the_module": (_in_globals(CallsGlobalFunction), r"global 'HELD', which _held_lookup reads"),
    "another_class": (_in_globals(ReadsRegistry), r"global 'Registry\.module'"),
    "its_own_class": (_in_globals(ReadsItsClass), r"attribute 'shared' of the class ReadsItsClass"),
    "closure_of_the_class": (_local_class, r"Local\.forward -> closure variable 'module'"),
    "default_of_the_class": (_class_with_a_default, r"Local\.forward -> default argument"),
    "generator": (_generator, r"Reaching\.lookup -> bound to: a generator"),
    "iterator": (_iterator, r"Reaching\.lookup -> closure variable 'lookups': a list_iterator"),
    "weakly_held_helper": (_weakly_held_helper, r"'reference': a weak reference to a Helper"),
}


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("sample", [False, True], ids=["unchecked", "sample"])
@pytest.mark.parametrize("way", FIXED)
def test_what_cannot_be_replaced_is_refused_by_name(way: str, sample: bool, inplace: bool) -> None:
    make, says = FIXED[way]
    model, features = Reaching(make), batch(5)
    before = model(features)
    with refused("bypassed_collection", "block.ebc", match=says):
        recfx.convert(model, (features,) if sample else None, inplace=inplace)
    assert isinstance(model.block.ebc, EmbeddingBagCollection)
    torch.testing.assert_close(model(features), before)
    (entry,) = recfx.explain(model).collections
    assert (entry.status, entry.reason) == ("refused", "bypassed_collection")
    kept = recfx.convert(model, inplace=inplace, on_unsupported="keep")
    assert isinstance(kept.block.ebc, EmbeddingBagCollection)
    assert not recfx.explain(kept).ok


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("target", TARGETS)
def test_with_a_sample_the_calls_are_counted(target: str, inplace: bool) -> None:
    """Where nothing can be found by looking: the value of a context variable is in no object that Python shows."""
    model = Reaching(_in_globals(ReadsContext))
    HELD_IN_CONTEXT.set(TARGETS[target](model))
    with refused("bypassed_collection", "block.ebc", match="calls the original collection"):
        recfx.convert(model, (batch(5),), inplace=inplace)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(model.block.ebc, EmbeddingBagCollection)


@pytest.mark.parametrize("target", TARGETS)
def test_verify_sees_what_was_put_back_later(target: str) -> None:
    model, features = Reaching(lambda model: setattr(model, "lookup", Helper(TARGETS[target](model)))), batch(5)
    converted = recfx.convert(model, (features,))
    assert recfx.verify(model, converted, (features,)).ok
    converted.lookup = Helper(Helper(TARGETS[target](model)))
    report = recfx.verify(model, converted, (features,))
    wrong = [check for check in report.of("different") if check.what == "calls"]
    assert {(check.mode, check.where) for check in wrong} == {("train", "block.ebc"), ("eval", "block.ebc")}
    assert "reaches the original's modules through Reaching.lookup.module.module" in wrong[0].message


def test_a_collection_that_one_mode_alone_goes_around() -> None:
    class InEval(Reaching):
        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            block = self.block if self.training else HELD_IN_CONTEXT.get()
            return self.over(block(features).values())

    model = Reaching(lambda model: setattr(model, "__class__", InEval))
    HELD_IN_CONTEXT.set(model.block)
    with refused("bypassed_collection", match="calls the original"):
        recfx.convert(model, (batch(5),))


# Code that reads what leads to the model: what its source shows to call nothing is noted, anything else is refused

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


UNCLEAR = "APPLICATION.steps += sum(each.training for each in self.instances)"
"""It calls nothing, which the source does not show, but a sample does."""


@pytest.mark.parametrize("code", NOTED)
def test_what_takes_nothing_to_call_is_noted(code: str, file: Path) -> None:
    model, features = _module_with(code, file).Model(), batch(5)
    before = model(features)
    for sample in (None, (features,)):
        converted = recfx.convert(model, sample)
        assert isinstance(converted.ebc, HashEmbeddingBagCollection)
        torch.testing.assert_close(converted(features), before)
        (note,) = [reason for reason in recfx.explain(converted).reasons if reason.code == "bypass_not_called"]
        assert (note.path, note.severity) == ("ebc", "info")
        assert "is also reached by" in note.message
    dry = recfx.explain(model)
    assert dry.ok
    assert "bypass_not_called" in {reason.code for reason in dry.reasons}


@pytest.mark.parametrize("code", [*REFUSED, UNCLEAR])
def test_what_may_call_is_refused(code: str, file: Path) -> None:
    _assert_refused(_module_with(code, file).Model())


def _assert_refused(model: Any) -> None:
    with refused("bypassed_collection", "ebc", match="is also reached by"):
        recfx.convert(model)


def test_a_class_attribute_that_no_code_names_is_refused(file: Path) -> None:
    """What has no source may call it."""
    module = _module_with("n = APPLICATION.steps", file)
    model = module.Model()
    recfx.convert(model)
    module.Application.lookup = model.ebc
    _assert_refused(model)


def test_what_is_called_len_but_is_another_function_is_refused(file: Path) -> None:
    module = _module_with("n = len(HELD)", file)
    module.len = lambda modules: modules["module"].ebc  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_what_code_reads_and_does_not_call_is_cleared_by_a_sample(inplace: bool, file: Path) -> None:
    model, features = _module_with(UNCLEAR, file).Model(), batch(5)
    before = model(features)
    with refused("bypassed_collection", "ebc", match="is also reached by"):
        recfx.convert(model, (features,), verify=False, inplace=inplace)
    assert isinstance(model.ebc, EmbeddingBagCollection)
    converted = recfx.convert(model, (features,), inplace=inplace)
    assert isinstance(converted.get_submodule("ebc"), HashEmbeddingBagCollection)
    torch.testing.assert_close(converted(features), before)
    noted = [note for note in recfx.explain(converted).reasons if note.code == "bypass_not_called"]
    assert {note.path for note in noted} == {"ebc"}
    assert "APPLICATION" in noted[0].message or "instances" in noted[0].message


def test_a_sample_that_is_compared_in_one_mode_alone_clears_nothing(file: Path) -> None:
    def only_in_eval(module: nn.Module, inputs: object) -> None:
        if module.training:
            raise RuntimeError("no training here")

    model = _module_with(UNCLEAR, file).Model()
    model.register_forward_pre_hook(only_in_eval)
    with refused("bypassed_collection"):
        recfx.convert(model, (batch(5),))
