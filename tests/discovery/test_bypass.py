"""Collections that a model reaches by other ways than registered modules are converted there, too."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.collections.pooled import HashEmbeddingBagCollection
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.discovery.reaching import TARGETS, Block, Helper, Reaching, assert_converted_is_called
from tests.support.refusals import refused

Lookup = Callable[[KeyedJaggedTensor], Any]


class Slotted:
    __slots__ = ("__module", "other")

    def __init__(self, module: nn.Module) -> None:
        self.__module = module

    def __call__(self, features: KeyedJaggedTensor) -> Any:
        return self.__module(features)


class ListOfModules(list[Any]):
    label = "mine"

    def __call__(self, features: KeyedJaggedTensor) -> Any:
        return self[0](features)


class Pair(NamedTuple):
    name: str
    module: nn.Module


@dataclass(frozen=True)
class Frozen:
    module: nn.Module
    scale: float = 1.0

    def __call__(self, features: KeyedJaggedTensor) -> Any:
        return self.module(features)


@dataclass(frozen=True, eq=True)
class FrozenInSlots:
    __slots__ = ("module",)
    module: nn.Module


def _default(module: nn.Module) -> Lookup:
    return lambda features, module=module: module(features)


def _keyword_default(module: nn.Module) -> Lookup:
    def lookup(features: KeyedJaggedTensor, *, module: nn.Module = module) -> Any:
        return module(features)

    return lookup


def _nested(module: nn.Module) -> Lookup:
    def inner(features: KeyedJaggedTensor) -> Any:
        return module(features)

    @functools.wraps(inner)
    def outer(features: KeyedJaggedTensor) -> Any:
        return inner(features)

    return outer


def _recursive(module: nn.Module) -> Lookup:
    def lookup(features: KeyedJaggedTensor, again: bool = True) -> Any:
        return lookup(features, False) if again else module(features)

    return lookup


def _weakly(module: nn.Module) -> Lookup:
    reference = weakref.ref(module)
    return lambda features: reference()(features)  # type: ignore[misc]


def _in_a_cycle(module: nn.Module) -> Lookup:
    first, second = Helper(None), Helper(module)
    first.module, second.back = second, first  # type: ignore[attr-defined]
    return first


def _weak_values(module: nn.Module) -> Lookup:
    modules: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary({"one": module})
    return lambda features: modules["one"](features)


def _weak_keys(module: nn.Module) -> Lookup:
    modules = weakref.WeakKeyDictionary({module: 1})
    return lambda features: next(iter(modules.keys()))(features)


def _deep(module: nn.Module) -> Lookup:
    nested: Any = Helper(module)
    for _ in range(3000):
        nested = [nested]

    def lookup(features: KeyedJaggedTensor) -> Any:
        inner = nested
        while isinstance(inner, list):
            inner = inner[0]
        return inner(features)

    return lookup


WAYS: dict[str, Callable[[nn.Module], Lookup]] = {
    "helper": Helper,
    "helper_in_a_list": lambda module: functools.partial(lambda box, features: box[0](features), [Helper(module)]),
    "helper_of_a_helper": lambda module: Helper(Helper(module)),
    "list_inside_a_helper": lambda module: functools.partial(lambda h, f: h.module[0](f), Helper([module])),
    "method_of_a_helper": lambda module: Helper(module).run,
    "forward_method": lambda module: module.forward,
    "cycle_of_helpers": _in_a_cycle,
    "slots": Slotted,
    "frozen_dataclass": Frozen,
    "frozen_dataclass_in_slots": lambda module: Helper(FrozenInSlots(module)).module.module.__call__,
    "namedtuple": lambda module: functools.partial(lambda pair, features: pair.module(features), Pair("a", module)),
    "namespace": lambda module: types.SimpleNamespace(run=module).run,
    "namespace_held": lambda module: functools.partial(lambda n, f: n.run(f), types.SimpleNamespace(run=module)),
    "list_subclass": lambda module: ListOfModules([module]),
    "deque": lambda module: functools.partial(lambda d, f: d[0](f), collections.deque([module], maxlen=3)),
    "defaultdict": lambda module: functools.partial(lambda d, f: d["new"](f), collections.defaultdict(lambda: module)),
    "ordered_dict": lambda module: functools.partial(lambda d, f: d["a"](f), collections.OrderedDict(a=Helper(module))),
    "user_dict": lambda module: functools.partial(lambda d, f: d["a"](f), collections.UserDict(a=module)),
    "mapping_proxy": lambda module: functools.partial(lambda d, f: d["a"](f), types.MappingProxyType({"a": module})),
    "dict_key": lambda module: functools.partial(lambda d, f: next(iter(d))(f), {module: "name"}),
    "frozenset": lambda module: functools.partial(lambda d, f: next(iter(d))(f), frozenset([module])),
    "get_of_a_dict": lambda module: functools.partial(lambda get, f: get("a")(f), {"a": module}.get),
    "closure": lambda module: lambda features: module(features),
    "closure_of_a_helper": lambda module: (lambda helper: lambda features: helper(features))(Helper(module)),
    "nested_closure": _nested,
    "recursive_closure": _recursive,
    "default": _default,
    "keyword_default": _keyword_default,
    "partial": lambda module: functools.partial(lambda lookup, features: lookup(features), module),
    "partial_of_the_module": lambda module: functools.partial(module),
    "keyword_of_a_partial": lambda module: functools.partial(lambda features, lookup: lookup(features), lookup=module),
    "cache": lambda module: functools.partial(lambda get, f: get()(f), functools.lru_cache(lambda: module)),
    "weak_reference": _weakly,
    "weak_proxy": lambda module: functools.partial(lambda lookup, f: lookup.forward(f), weakref.proxy(module)),
    "weak_method": lambda module: functools.partial(lambda lookup, f: lookup()(f), weakref.WeakMethod(module.forward)),
    "weak_values": _weak_values,
    "weak_keys": _weak_keys,
    "weak_set": lambda module: functools.partial(lambda s, f: next(iter(s))(f), weakref.WeakSet([module])),
    "unregistered_module": lambda module: [Block(module)][0].forward,
    "no_grad": lambda module: torch.enable_grad()(module.forward),
    "deep_nest": _deep,
}  # fmt: skip


def reaching(way: str, target: str, attribute: str = "lookup") -> Reaching:
    torch.manual_seed(0)
    return Reaching(lambda model: model.__dict__.update({attribute: WAYS[way](TARGETS[target](model))}))


@pytest.mark.parametrize("inplace", [True, False])
def test_a_proxy_of_what_is_gone_stays_as_it_is(inplace: bool) -> None:
    model = reaching("helper", next(iter(TARGETS)))
    trainer = Helper(model)
    model.trainer = proxy = weakref.proxy(trainer)
    del trainer
    assert recfx.convert(model, (batch(5),), inplace=inplace).__dict__["trainer"] is proxy


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("way", WAYS)
def test_the_converted_model_calls_its_own_collection(way: str, target: str) -> None:
    model, features = reaching(way, target), batch(5)
    before = model(features)
    converted = recfx.convert(model)
    assert_converted_is_called(model, converted, converted.block.ebc)
    torch.testing.assert_close(model(features), before)
    calls: list[str] = []
    converted.block.ebc.graph_module.register_forward_pre_hook(lambda *_: calls.append("converted"))
    model(features)
    assert not calls  # the original has not changed
    assert isinstance(model.block.ebc, EmbeddingBagCollection)
    assert recfx.convert(model, inplace=True) is model
    assert_converted_is_called(reaching(way, target), model, model.block.ebc)


@pytest.mark.parametrize("way", WAYS)
def test_raw_ids_reach_the_index_by_any_way_and_back(way: str) -> None:
    model = reaching(way, "block")
    converted = recfx.convert(model, (batch(5),), hashing=recfx.HashConfig(dense_rows=0))
    # What was compared were copies, also of what copy.deepcopy shares.
    assert all(parameter.grad is None for parameter in converted.parameters())
    assert not any(len(converted.block.ebc.index(table.name)) for table in converted.block.ebc.tables)
    raw = KeyedJaggedTensor(["f1", "f2", "f3"], torch.tensor([2**60, 2, 3]), lengths=torch.tensor([1, 1, 1]))
    converted(raw)
    assert 2**60 in converted.block.ebc.index("t1").items()[0]
    plain, _ = recfx.unconvert(converted, with_mapping=True)
    plain(batch(5))  # rows: the converted collection would take them for ids, and insert them
    assert isinstance(plain.block.ebc, EmbeddingBagCollection)


def _recursive_hook(ebc: nn.Module) -> Callable[..., Any]:
    def look_up(count: int, features: Any) -> Any:
        return look_up(count - 1, features) if count else ebc(features)

    return lambda _, inputs, __: look_up(1, inputs[0])


def _hook_with_an_attribute(ebc: nn.Module) -> Callable[..., Any]:
    def hook(_: nn.Module, inputs: Any, __: Any) -> Any:
        return hook.ebc(inputs[0])  # type: ignore[attr-defined]

    hook.ebc = ebc  # type: ignore[attr-defined]
    return hook


HOOKS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "closure": lambda ebc: lambda _, inputs, __: ebc(inputs[0]),
    "default": lambda ebc: lambda _, inputs, __, collection=ebc: collection(inputs[0]),
    "nested": lambda ebc: (lambda look_up: lambda _, inputs, __: look_up(inputs[0]))(lambda features: ebc(features)),
    "partial": lambda ebc: functools.partial(lambda look_up, _, inputs, __: look_up(inputs[0]), ebc.__call__),
    "recursive": _recursive_hook,
    "attribute of itself": _hook_with_an_attribute,
}


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("way", HOOKS)
def test_a_hook_that_calls_a_collection_calls_the_converted_one(way: str, inplace: bool) -> None:
    model: Any = nn.Identity()
    model.ebc, features = collection(), batch(5)
    model.register_forward_hook(HOOKS[way](model.ebc))
    before = model(features).values()
    converted: Any = recfx.convert(model, inplace=inplace)
    calls: list[str] = []
    converted.ebc.register_forward_hook(lambda *_: calls.append("converted"))
    torch.testing.assert_close(converted(features).values(), before, rtol=1e-5, atol=1e-6)
    assert calls == ["converted"]
    assert inplace or isinstance(model.ebc, EmbeddingBagCollection)


OBJECTS_OF_HOOKS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "object": lambda ebc: CallsIt(ebc),
    "method": lambda ebc: CallsIt(ebc).__call__,
    "object in a closure": lambda ebc: (lambda caller: lambda *args: caller(*args))(CallsIt(ebc)),
    "dict in a closure": lambda ebc: (lambda by_name: lambda _, inputs, __: by_name["ebc"](inputs[0]))({"ebc": ebc}),
    "object in a partial": lambda ebc: functools.partial(CallsIt.__call__, CallsIt(ebc)),
}


class CallsIt:
    """A hook that has a collection of its own; not a module."""

    def __init__(self, ebc: nn.Module) -> None:
        self.ebc = ebc

    def __call__(self, _: nn.Module, inputs: tuple[KeyedJaggedTensor], __: Any) -> Any:
        return self.ebc(inputs[0])


class Around(nn.Identity):
    """Does not call the collection that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()


@pytest.mark.parametrize("way", OBJECTS_OF_HOOKS)
def test_an_object_that_only_a_hook_holds_is_patched_in_place_and_noted_in_a_copy(way: str) -> None:
    model: Any = nn.Sequential(Around())
    features = batch(5)
    model[0].register_forward_hook(OBJECTS_OF_HOOKS[way](model[0].ebc))
    copied = recfx.convert(model)
    (note,) = [reason for reason in recfx.explain(copied).reasons if reason.code == "held_by_hook"]
    assert note.path == "0"
    assert "0._forward_hooks" in note.message
    with refused("bypassed_collection"):
        recfx.convert(model, (features,))
    converted: Any = recfx.convert(model, inplace=True)
    assert "held_by_hook" not in [reason.code for reason in recfx.explain(converted).reasons]
    calls: list[str] = []
    converted[0].ebc.register_forward_hook(lambda *_: calls.append("converted"))
    converted(features)
    assert calls == ["converted"]


@pytest.mark.parametrize("sampled", [True, False], ids=["sample", "no sample"])
def test_a_hook_that_remembers_its_collection_in_a_variable_remembers_the_converted_one(sampled: bool) -> None:
    model: Any = nn.Sequential(Around())
    features, remembered = batch(5), dict[str, Any]()
    model[0].register_forward_hook(lambda _, inputs, __: remembered.setdefault("ebc", model[0].ebc)(inputs[0]))
    converted: Any = recfx.convert(model, (features,) if sampled else None)
    assert not remembered
    model(features)
    assert remembered["ebc"] is model[0].ebc
    calls: list[str] = []
    converted[0].ebc.register_forward_hook(lambda *_: calls.append("converted"))
    converted(features)
    assert calls == ["converted"]


def test_a_hook_that_keeps_a_copy_of_the_check_is_refused() -> None:
    """It refers to no module, so copies share it: the first that runs would be called by all others from then on."""
    model: Any = Around()  # whose own hooks no trace runs
    remembered: list[nn.Module] = []
    model.register_forward_hook(
        lambda mod, inputs, _: (remembered or remembered.append(mod.ebc), remembered[0](inputs[0]))[1]
    )
    with refused("bypassed_collection", match="puts a module of it into Around._forward_hooks"):
        recfx.convert(model, (batch(5),))
    assert remembered == [model.ebc]


class Remembers:
    """Remembers the collection when it is first called; not a module."""

    def __init__(self) -> None:
        self.where: dict[str, Any] = {}

    def __call__(self, model: Reaching, features: KeyedJaggedTensor) -> Any:
        return self.where.setdefault("ebc", model.block.ebc)(features)


class RemembersInAClosure(Remembers):
    def __init__(self) -> None:
        where: dict[str, Any] = {}
        self.run = lambda model, features: where.setdefault("ebc", model.block.ebc)(features)

    def __call__(self, model: Reaching, features: KeyedJaggedTensor) -> Any:
        return self.run(model, features)


class RemembersForAll(Remembers):
    everywhere: ClassVar[dict[str, Any]] = {}

    def __call__(self, model: Reaching, features: KeyedJaggedTensor) -> Any:
        return self.everywhere.setdefault("ebc", model.block.ebc)(features)


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("kind", [Remembers, RemembersInAClosure])
def test_what_remembers_its_collection_in_a_trace_calls_the_converted_one(kind: type[Remembers], inplace: bool) -> None:
    helper, features = kind(), batch(5)
    model: Any = Reaching(lambda model: setattr(model, "lookup", functools.partial(helper, model)))
    recfx.explain(model, (features,))
    converted: Any = recfx.convert(model, (features,), inplace=inplace)
    calls: list[str] = []
    converted.block.ebc.register_forward_hook(lambda *_: calls.append("converted"))
    converted(features)
    assert calls == ["converted"]


def test_what_code_remembers_for_all_models_is_refused() -> None:
    helper = RemembersForAll()
    model: Any = Reaching(lambda model: setattr(model, "lookup", functools.partial(helper, model)))
    try:
        with refused("bypassed_collection", "block.ebc", match="calling the model puts a module of it into"):
            recfx.convert(model, (batch(5),))
    finally:
        RemembersForAll.everywhere.clear()


def test_an_exception_that_holds_a_collection_is_refused() -> None:
    model = Reaching(lambda model: setattr(model, "lookup", ValueError(model.block.ebc)))
    with refused("bypassed_collection", "block.ebc", match="a ValueError, of which no copy can be made"):
        recfx.convert(model)


def test_a_deep_copy_of_what_was_converted_goes_on() -> None:
    model = reaching("helper", "block")
    converted = recfx.convert(model)
    duplicate = copy.deepcopy(converted)
    assert duplicate.lookup.module is duplicate.block
    assert_converted_is_called(model, duplicate, duplicate.block.ebc)


# What refers to a model, or is held by it, without being a way to its collections

HELD: dict[str, Any] = {}


class Plain(nn.Module):
    """Calls its collection, and its table by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()
        self.over = nn.Linear(24, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        direct = self.ebc.embedding_bags["t1"](torch.tensor([1, 2]), torch.tensor([0, 2]))
        return self.over(self.ebc(features).values()) + direct.sum()

    def summary(self) -> Any:
        """Reads a global that holds a model, but no forward calls it."""
        return HELD["module"]


def _everything_around(model: Plain) -> list[Any]:
    """Variables of the caller's, handles, optimizers, hooks: they hold the model, the model does not hold them."""
    HELD["module"] = model
    tracker = Helper(model)
    model.handle = model.ebc.register_forward_hook(lambda *_: setattr(tracker, "calls", tracker.calls + 1))
    model.ebc.register_forward_pre_hook(lambda *_: None)
    model.optimizer = torch.optim.Adam(model.parameters())
    model.schedule = torch.optim.lr_scheduler.StepLR(model.optimizer, 1)
    model.instances = weakref.WeakSet([model])
    model.owner = weakref.ref(model)
    model.configs = model.ebc.embedding_bag_configs()
    model.weights = {name: parameter for name, parameter in model.named_parameters()}  # noqa: C416
    model.names = ((name, "x") for name in ["a"])
    model.log = sys.stdout
    for parameter in model.parameters():
        parameter.owner = model
    return [gc.get_objects(), [model], sys._getframe(), tracker]


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_what_holds_the_model_without_being_held_is_no_matter(inplace: bool) -> None:
    model = Plain()
    around = _everything_around(model)
    converted = recfx.convert(model, inplace=inplace)
    assert isinstance(converted.ebc, HashEmbeddingBagCollection)
    assert converted.owner() is converted
    assert list(converted.instances) == [converted]
    converted(batch(3))
    assert around[-1].calls == 1  # the user's own tracker
    assert (around[-1].module is converted) == inplace


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_what_a_started_thread_runs_is_no_way_to_the_model(inplace: bool) -> None:
    """A writer that runs beside the training: the forward cannot call the thread's function by the thread."""
    model, stop = Plain(), threading.Event()

    def write(written: nn.Module, *, again: Callable[[], Any]) -> None:
        stop.wait(60)

    model.writer = threading.Thread(target=write, args=(model,), kwargs={"again": model.summary}, daemon=True)
    with refused("bypassed_collection", match="a Thread"):  # run() would call it
        recfx.convert(model, inplace=inplace)
    model.writer.start()
    try:
        converted = recfx.convert(model, inplace=inplace)
    finally:
        stop.set()
        model.writer.join(60)
    assert isinstance(converted.ebc, HashEmbeddingBagCollection)
    assert converted.writer is model.writer


class Asserts(Plain):
    """pytest rewrites its ``assert``: the forward then reads a module of pytest, and that holds the running test."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = super().forward(features)
        assert pooled.dim() == 2
        return pooled


@pytest.fixture
def asserting() -> Asserts:
    return Asserts()


def test_what_pytest_holds_is_no_way_to_the_model(asserting: Asserts) -> None:
    assert isinstance(recfx.convert(asserting).ebc, HashEmbeddingBagCollection)


def test_calls_of_a_table_by_itself_are_no_calls_of_the_collection() -> None:
    assert recfx.explain(recfx.convert(Plain(), (batch(4),))).ok


def test_state_that_leads_to_no_module_stays_shared() -> None:
    model, count = Plain(), [0]
    model.settings = Helper("a string")
    model.count = lambda: count.append(0)
    converted = recfx.convert(model)
    assert converted.settings is model.settings
    assert converted.count is model.count


def test_helpers_that_are_one_stay_one() -> None:
    model = Plain()
    helper = Helper(model.ebc)
    model.first, model.second, model.names = helper, [helper], {"both": (helper, model.ebc)}
    model.ebc.helper = helper
    for inplace in (False, True):
        converted = recfx.convert(model, inplace=inplace)
        assert converted.first is converted.second[0] is converted.names["both"][0] is converted.ebc.helper
        assert converted.first.module is converted.ebc is converted.names["both"][1]
        assert (converted.first is helper) == inplace


def test_the_users_own_variables_stay() -> None:
    """A lambda's variable is the caller's local one: in place, too, only the model's function changes."""
    model = Plain()
    ebc = model.ebc
    function = lambda features: ebc(features)  # noqa: E731
    model.lookup = function
    recfx.convert(model, inplace=True)
    assert isinstance(ebc, EmbeddingBagCollection)
    assert function.__closure__[0].cell_contents is ebc
    assert model.lookup is not function
