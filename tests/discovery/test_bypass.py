"""Collections that a model reaches by other ways than registered modules: converted there too, or refused by name."""

from __future__ import annotations

import collections
import contextvars
import copy
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.modules.collection import HashEmbeddingBagCollection
from tests.builders.batches import batch
from tests.builders.collections import collection

Lookup = Callable[[KeyedJaggedTensor], Any]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    """Something around a collection: what refers to it must get its copy."""

    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(features)


class Reaching(nn.Module):
    """Its collection is registered inside a block, and called by another way."""

    def __init__(self, way: Callable[[Reaching], None]) -> None:
        super().__init__()
        self.block = Block(collection())
        self.over = nn.Linear(24, 1)
        way(self)

    def lookup(self, features: KeyedJaggedTensor) -> Any:
        raise NotImplementedError

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.lookup(features).values())


class Helper:
    def __init__(self, module: Any) -> None:
        self.module, self.calls = module, 0

    def __call__(self, features: KeyedJaggedTensor) -> Any:
        self.calls += 1
        return self.run(features)

    def run(self, features: KeyedJaggedTensor) -> Any:
        return self.module(features)


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


class Callback(nn.Module):
    """A module that nobody registers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.module(features)


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
    held: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary({"one": module})
    return lambda features: held["one"](features)


def _weak_keys(module: nn.Module) -> Lookup:
    held = weakref.WeakKeyDictionary({module: 1})
    return lambda features: next(iter(held.keys()))(features)


def _deep(module: nn.Module) -> Lookup:
    held: Any = Helper(module)
    for _ in range(3000):
        held = [held]

    def lookup(features: KeyedJaggedTensor) -> Any:
        found = held
        while isinstance(found, list):
            found = found[0]
        return found(features)

    return lookup


WAYS: dict[str, Callable[[nn.Module], Lookup]] = {
    "helper": Helper,
    "helper_in_a_list": lambda module: functools.partial(lambda held, features: held[0](features), [Helper(module)]),
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
    "partial": lambda module: functools.partial(lambda held, features: held(features), module),
    "partial_of_the_module": lambda module: functools.partial(module),
    "keyword_of_a_partial": lambda module: functools.partial(lambda features, held: held(features), held=module),
    "cache": lambda module: functools.partial(lambda get, f: get()(f), functools.lru_cache(lambda: module)),
    "weak_reference": _weakly,
    "weak_proxy": lambda module: functools.partial(lambda held, f: held.forward(f), weakref.proxy(module)),
    "weak_method": lambda module: functools.partial(lambda held, f: held()(f), weakref.WeakMethod(module.forward)),
    "weak_values": _weak_values,
    "weak_keys": _weak_keys,
    "weak_set": lambda module: functools.partial(lambda s, f: next(iter(s))(f), weakref.WeakSet([module])),
    "unregistered_module": lambda module: [Callback(module)][0].forward,
    "no_grad": lambda module: torch.enable_grad()(module.forward),
    "deep_nest": _deep,
}  # fmt: skip

TARGETS: dict[str, Callable[[Reaching], nn.Module]] = {
    "collection": lambda model: model.block.ebc,
    "block": lambda model: model.block,
}


def reaching(way: str, target: str, attribute: str = "lookup") -> Reaching:
    torch.manual_seed(0)
    return Reaching(lambda model: model.__dict__.update({attribute: WAYS[way](TARGETS[target](model))}))


def assert_converted_is_called(model: nn.Module, converted: nn.Module, collection: HashEmbeddingBagCollection) -> None:
    """The converted model calls its converted collection and no standard one; both models still agree."""
    calls: list[str] = []
    handle = collection.graph_module.register_forward_pre_hook(lambda *_: calls.append("converted"))
    forward = EmbeddingBagCollection.forward
    features = batch(5)
    converted(features)
    assert calls == ["converted"]
    handle.remove()
    torch.testing.assert_close(converted(features), model(features), rtol=1e-5, atol=1e-6)
    assert EmbeddingBagCollection.forward is forward


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_calls_its_own_collection(way: str, target: str) -> None:
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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("way", WAYS)
def test_in_place_the_model_calls_the_converted_one(way: str, target: str) -> None:
    model, reference = reaching(way, target), reaching(way, target)
    converted = recfx.convert(model, inplace=True)
    assert converted is model
    assert_converted_is_called(reference, converted, converted.block.ebc)


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


# Where it cannot be replaced

HELD: dict[str, Any] = {}
HELD_IN_CONTEXT: contextvars.ContextVar[nn.Module] = contextvars.ContextVar("held")


class Registry:
    """A class of which nobody makes an instance."""

    held: Any = None


def _held_lookup(features: KeyedJaggedTensor) -> Any:
    return HELD["module"](features)


class ReadsGlobal(Reaching):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(HELD["module"](features).values())


class CallsGlobalFunction(Reaching):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.find(features).values())

    def find(self, features: KeyedJaggedTensor) -> Any:
        return next(_held_lookup(each) for each in [features])


class ReadsRegistry(Reaching):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(Registry.held(features).values())


class ReadsItsClass(Reaching):
    shared: Any = []  # noqa: RUF012

    @property
    def found(self) -> Any:
        return self.shared[0]

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.found(features).values())


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
    held = iter([model.block.ebc] * 100)
    model.lookup = lambda features: next(held)(features)  # type: ignore[method-assign]


def _weakly_held_helper(model: Reaching) -> None:
    helper = Helper(model.block)
    HELD["helper"] = helper
    reference = weakref.ref(helper)
    model.lookup = lambda features: reference()(features)  # type: ignore[misc, method-assign]


def _in_globals(kind: type[Reaching]) -> Callable[[Reaching], None]:
    def way(model: Reaching) -> None:
        model.__class__ = kind
        HELD["module"] = Registry.held = model.block
        ReadsItsClass.shared[:] = [model.block.ebc]

    return way


FIXED: dict[str, tuple[Callable[[Reaching], None], str]] = {
    "global": (_in_globals(ReadsGlobal), r"global 'HELD', which ReadsGlobal\.forward reads"),
    "function_of_the_module": (_in_globals(CallsGlobalFunction), r"global 'HELD', which _held_lookup reads"),
    "another_class": (_in_globals(ReadsRegistry), r"global 'Registry\.held'"),
    "its_own_class": (_in_globals(ReadsItsClass), r"attribute 'shared' of the class ReadsItsClass"),
    "closure_of_the_class": (_local_class, r"Local\.forward -> closure variable 'module'"),
    "default_of_the_class": (_class_with_a_default, r"Local\.forward -> default argument"),
    "generator": (_generator, r"Reaching\.lookup -> bound to: a generator"),
    "iterator": (_iterator, r"Reaching\.lookup -> closure variable 'held': a list_iterator"),
    "weakly_held_helper": (_weakly_held_helper, r"'reference': a weak reference to a Helper"),
}


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("sample", [False, True], ids=["unchecked", "sample"])
@pytest.mark.parametrize("way", FIXED)
def test_what_cannot_be_replaced_is_refused_by_name(way: str, sample: bool, inplace: bool) -> None:
    make, says = FIXED[way]
    model, features = Reaching(make), batch(5)
    before = model(features)
    with pytest.raises(recfx.ConversionError, match=says) as caught:
        recfx.convert(model, (features,) if sample else None, inplace=inplace)
    assert (caught.value.reason, caught.value.module_path) == ("bypassed_collection", "block.ebc")
    assert isinstance(model.block.ebc, EmbeddingBagCollection)
    torch.testing.assert_close(model(features), before)
    (found,) = recfx.explain(model).collections
    assert (found.status, found.reason) == ("refused", "bypassed_collection")
    kept = recfx.convert(model, inplace=inplace, on_unsupported="keep")
    assert isinstance(kept.block.ebc, EmbeddingBagCollection)
    assert not recfx.explain(kept).ok


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("target", TARGETS)
def test_with_a_sample_the_calls_are_counted(target: str, inplace: bool) -> None:
    """Where nothing can be found by looking: the value of a context variable is in no object that Python shows."""
    model = Reaching(_in_globals(ReadsContext))
    HELD_IN_CONTEXT.set(TARGETS[target](model))
    with pytest.raises(recfx.ConversionError, match="calls the original collection") as caught:
        recfx.convert(model, (batch(5),), inplace=inplace)
    assert (caught.value.reason, caught.value.module_path) == ("bypassed_collection", "block.ebc")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(model.block.ebc, EmbeddingBagCollection)


@pytest.mark.parametrize("target", TARGETS)
def test_verify_sees_what_was_put_back_later(target: str) -> None:
    model, features = reaching("helper", target), batch(5)
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
            found = self.block if self.training else HELD_IN_CONTEXT.get()
            return self.over(found(features).values())

    model = Reaching(lambda model: setattr(model, "__class__", InEval))
    HELD_IN_CONTEXT.set(model.block)
    with pytest.raises(recfx.ConversionError, match="calls the original") as caught:
        recfx.convert(model, (batch(5),))
    assert caught.value.reason == "bypassed_collection"


# What code reads without calling the collection: a sample tells


class Application:
    """Something global that many models' code reads: it holds the model, and counts."""

    model: nn.Module | None = None
    steps = 0


APPLICATION = Application()


class CountsSteps(nn.Module):
    """Reads a global that leads to the model, and calls nothing there."""

    instances: list[nn.Module] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()
        self.over = nn.Linear(24, 1)
        self.instances.append(self)
        APPLICATION.model = self

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        APPLICATION.steps += len(self.instances)
        return self.over(self.ebc(features).values())


@pytest.fixture
def counts_steps() -> Iterator[CountsSteps]:
    yield CountsSteps()
    CountsSteps.instances.clear()
    APPLICATION.model = None


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_what_code_reads_and_does_not_call_is_cleared_by_a_sample(counts_steps: CountsSteps, inplace: bool) -> None:
    features = batch(5)
    before = counts_steps(features)
    converted = recfx.convert(counts_steps, (features,), inplace=inplace)
    assert isinstance(converted.get_submodule("ebc"), HashEmbeddingBagCollection)
    torch.testing.assert_close(converted(features), before)
    noted = [note for note in recfx.explain(converted).reasons if note.code == "bypass_not_called"]
    assert {note.path for note in noted} == {"ebc"}
    assert "APPLICATION" in noted[0].message or "instances" in noted[0].message


@pytest.mark.parametrize("verify", [None, False], ids=["no sample", "not verified"])
def test_without_a_comparison_it_is_refused(counts_steps: CountsSteps, verify: bool | None) -> None:
    sample = None if verify is None else (batch(5),)
    with pytest.raises(recfx.ConversionError, match="is also reached by") as caught:
        recfx.convert(counts_steps, sample, verify=verify)
    assert (caught.value.reason, caught.value.module_path) == ("bypassed_collection", "ebc")
    assert isinstance(counts_steps.ebc, EmbeddingBagCollection)


def test_a_sample_that_is_compared_in_one_mode_alone_clears_nothing(counts_steps: CountsSteps) -> None:
    def only_in_eval(module: nn.Module, inputs: object) -> None:
        if module.training:
            raise RuntimeError("no training here")

    counts_steps.register_forward_pre_hook(only_in_eval)
    with pytest.raises(recfx.ConversionError) as caught:
        recfx.convert(counts_steps, (batch(5),))
    assert caught.value.reason == "bypassed_collection"


# What is no reason to refuse


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

    def write(held: nn.Module, *, again: Callable[[], Any]) -> None:
        stop.wait(60)

    model.writer = threading.Thread(target=write, args=(model,), kwargs={"again": model.summary}, daemon=True)
    with pytest.raises(recfx.ConversionError, match="a Thread") as caught:  # run() would call it
        recfx.convert(model, inplace=inplace)
    assert caught.value.reason == "bypassed_collection"
    model.writer.start()
    try:
        converted = recfx.convert(model, inplace=inplace)
    finally:
        stop.set()
        model.writer.join()
    assert isinstance(converted.ebc, HashEmbeddingBagCollection)
    assert converted.writer is model.writer


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


def test_a_deep_copy_of_what_was_converted_goes_on() -> None:
    model = reaching("helper", "block")
    converted = recfx.convert(model)
    duplicate = copy.deepcopy(converted)
    assert duplicate.lookup.module is duplicate.block
    assert_converted_is_called(model, duplicate, duplicate.block.ebc)
