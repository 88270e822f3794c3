"""What a conversion reaches besides registered modules, and what it catches because it does not reach it."""

import contextlib
import copy
import functools
import pickle
import random
import threading
import weakref
from argparse import Namespace
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.copy_modules import copy_modules
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from tests.builders.batches import batch
from tests.builders.collections import collection
from tests.builders.models import Block
from tests.sharding.ranks import ranks
from tests.support.refusals import refused

Lookup = Callable[[KeyedJaggedTensor], Any]
HELD: dict[str, Any] = {}


class Reaching(nn.Module):
    """Its collection is registered inside a block, and called by another way."""

    def __init__(self, way: Callable[[nn.Module], Lookup], target: str = "block.ebc") -> None:
        super().__init__()
        self.block = Block()
        self.over = nn.Linear(24, 1)
        self.__dict__["lookup"] = way(self.get_submodule(target))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.lookup(features).values())  # type: ignore[operator]


class Helper:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, features: KeyedJaggedTensor) -> Any:
        return self.run(features)

    def run(self, features: KeyedJaggedTensor) -> Any:
        return self.module(features)


def _bound(method: str, module: nn.Module) -> Lookup:
    return getattr(module, method)


REACHED: dict[str, Callable[[nn.Module], Lookup]] = {
    "helper": Helper,
    "helper of a helper": lambda module: Helper(Helper(module)),
    "list in a helper": lambda module: functools.partial(lambda helper, f: helper.module[0](f), Helper([module])),
    "dict": lambda module: functools.partial(lambda held, f: held["a"](f), {"a": module}),
    "ordered dict": lambda module: functools.partial(lambda held, f: held["a"](f), OrderedDict(a=Helper(module))),
    "tuple": lambda module: functools.partial(lambda held, f: held[1](f), ("a", module)),
    "method of a helper": lambda module: Helper(module).run,
    "forward": functools.partial(_bound, "forward"),
    "call": functools.partial(_bound, "__call__"),
    "partial": lambda module: functools.partial(module),
    "beside a lock": lambda module: functools.partial(lambda held, f: held[0](f), [module, threading.Lock()]),
    "deque": lambda module: functools.partial(lambda held, f: held[0](f), deque([module])),
    "frozenset": lambda module: functools.partial(lambda held, f: next(iter(held))(f), frozenset([module])),
    "set": lambda module: functools.partial(lambda held, f: next(iter(held))(f), {module}),
    "key": lambda module: functools.partial(lambda held, f: next(iter(held))(f), {module: 1}),
    "namespace": lambda module: functools.partial(lambda held, f: held.a(f), SimpleNamespace(a=module)),
}


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("target", ["block.ebc", "block"])
@pytest.mark.parametrize("way", REACHED)
def test_attributes_lists_dicts_and_methods_refer_to_the_converted_collection(
    way: str, target: str, inplace: bool
) -> None:
    torch.manual_seed(0)
    model, features = Reaching(REACHED[way], target), batch(5)
    before = model(features)
    converted: Any = recfx.convert(model, inplace=inplace)
    if inplace and target == "block.ebc" and way in ("deque", "frozenset", "set", "key"):
        with refused("replaced_collection_called", "block.ebc"):
            converted(features)
        return
    calls: list[str] = []
    converted.block.ebc.graph_module.register_forward_pre_hook(lambda *_: calls.append("converted"))
    torch.testing.assert_close(converted(features), before, rtol=1e-5, atol=1e-6)
    assert calls == ["converted"]
    if not inplace:
        torch.testing.assert_close(model(features), before)
        assert (calls, type(model.block.ebc)) == (["converted"], EmbeddingBagCollection)


def _weakly(module: nn.Module) -> Lookup:
    reference = weakref.ref(module)
    return lambda features: reference()(features)  # type: ignore[misc]


def _globally(module: nn.Module) -> Lookup:
    HELD["ebc"] = module
    return lambda features: HELD["ebc"](features)


NOT_REACHED: dict[str, Callable[[nn.Module], Lookup]] = {
    "closure": lambda module: lambda features: module(features),
    "weak reference": _weakly,
    "global": _globally,
    "cache": lambda module: functools.partial(lambda get, f: get()(f), functools.lru_cache(lambda: module)),
}


@pytest.mark.parametrize("way", NOT_REACHED)
def test_an_original_that_a_copy_still_calls_is_caught(way: str) -> None:
    model, features = Reaching(NOT_REACHED[way]), batch(5)
    before, state = model(features), dict(vars(model.block.ebc))
    converted = recfx.convert(model)
    for again in range(2):
        with refused("replaced_collection_called", "block.ebc"):
            converted(features)
        torch.testing.assert_close(model(features), before)  # the original goes on by itself
        assert vars(model.block.ebc) == state, again
    for duplicate in (copy.deepcopy(model.block), pickle.loads(pickle.dumps(model.block))):
        torch.testing.assert_close(duplicate(features).values(), model.block(features).values())
    with refused("replaced_collection_called", "block.ebc"):
        recfx.convert(model, (features,))
    assert recfx.verify(model, converted, (features,)).of("different")[0].what == "calls"
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model(features), before)


def _inside_another(model: nn.Module) -> nn.Module:
    return recfx.convert(nn.ModuleDict({"a": recfx.convert(model), "b": Block()}))["a"]


AGAIN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "inside another": _inside_another,
    "unconvert": lambda model: recfx.unconvert(recfx.convert(model)),
    "copy of the modules": lambda model: copy_modules(recfx.convert(model))[0],
    "submodule": lambda model: recfx.convert(nn.Sequential(model))[0],  # type: ignore[index]
}


@pytest.mark.parametrize("way", AGAIN)
def test_parts_and_later_conversions_of_a_copy_catch_calls_as_well(way: str) -> None:
    model, features = Reaching(NOT_REACHED["global"]), batch(5)
    converted = AGAIN[way](model)
    with refused("replaced_collection_called"):
        converted(features)
    model(features)


def test_other_threads_call_the_original_while_a_copy_runs() -> None:
    torch.manual_seed(0)
    model, features, answers = Reaching(lambda module: lambda features: module(features)), batch(5), list[Any]()
    converted: Any = recfx.convert(model)

    def from_another_thread(_: KeyedJaggedTensor) -> Any:
        thread = threading.Thread(target=lambda: answers.append(model(features)))
        thread.start()
        thread.join()
        return converted.block.ebc(features)

    expected = model(features)
    converted.lookup = from_another_thread
    converted(features)
    torch.testing.assert_close(answers, [expected])


@pytest.mark.parametrize("way", ["closure", "global"])
def test_an_original_that_was_replaced_in_place_refuses_every_call(way: str) -> None:
    model, features = Reaching(NOT_REACHED[way]), batch(5)
    original = model.block.ebc
    assert recfx.convert(model, inplace=True) is model
    duplicates = (original, copy.deepcopy(original), pickle.loads(pickle.dumps(original)))
    for call in (model, *duplicates):
        with refused("replaced_collection_called", "block.ebc"):
            call(features)
    with refused("replaced_collection_called"):
        recfx.convert(original)
    model.block(features)
    plain: Any = recfx.unconvert(model)
    with refused("replaced_collection_called", "block.ebc"):
        plain(features)
    assert type(plain.block.ebc) is EmbeddingBagCollection
    torch.testing.assert_close(plain.block(features).values(), model.block(features).values())
    assert isinstance(recfx.convert(plain).block.ebc, HashEmbeddingBagCollection)


def sharded_later(rank: int, world_size: int, inplace: bool) -> str:
    features, held = batch(5), list[Any]()
    model: Any = recfx.convert(Reaching(lambda _: lambda features: held[0](features)))
    held.append(model.block.ebc)
    sharded = recfx.convert(model, env=ShardingEnv.from_process_group(dist.group.WORLD), inplace=inplace)
    with pytest.raises(recfx.ConversionError) as caught:
        sharded(features)
    return caught.value.reason


def test_a_converted_collection_that_was_sharded_later_is_caught() -> None:
    for inplace in (False, True):
        assert ranks(1).run(sharded_later, inplace) == ["replaced_collection_called"]


def test_a_model_that_is_a_collection_is_replaced_by_the_result() -> None:
    original, features = collection(), batch(5)
    converted = recfx.convert(original, inplace=True)
    converted(features)
    with refused("replaced_collection_called", ""):
        original(features)


def test_what_keeps_a_copy_of_the_check_is_caught() -> None:
    """The first model that runs would be called by all others from then on."""
    kept = dict[str, nn.Module]()

    class Keeps(Block):
        def forward(self, features: KeyedJaggedTensor) -> Any:
            return kept.setdefault("ebc", self.ebc)(features)

    with refused("replaced_collection_called", "ebc"):
        recfx.convert(Keeps(), (batch(5),))


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_hooks_that_are_methods_or_partials_are_bound_to_the_result(inplace: bool) -> None:
    class Hooked(Block):
        def hook(self, _: nn.Module, inputs: Any, __: Any) -> Any:
            return self.ebc(*inputs)

    def by_argument(held: Hooked, module: nn.Module, inputs: Any, output: Any) -> Any:
        return held.hook(module, inputs, output)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.first, self.second = Hooked(), nn.Identity(), nn.Identity()
            self.first.register_forward_hook(self.held.hook)
            self.second.register_forward_hook(functools.partial(by_argument, self.held))

        def forward(self, features: KeyedJaggedTensor) -> Any:
            return self.first(features).values() + self.second(features).values()

    model, features = Around(), batch(5)
    before = model(features)
    converted: Any = recfx.convert(model, inplace=inplace)
    calls: list[str] = []
    converted.held.ebc.register_forward_hook(lambda *_: calls.append("converted"))
    torch.testing.assert_close(converted(features), before, rtol=1e-5, atol=1e-6)
    assert calls == ["converted"] * 2


def test_helpers_that_are_one_stay_one_and_tensors_stand_for_themselves() -> None:
    model: Any = Reaching(Helper)
    model.first, model.second = model.lookup, [model.lookup]
    model.plain, model.teachers, model.generator = torch.ones(2), [nn.Linear(2, 2)], (i for i in range(3))
    duplicate: Any = copy_modules(model)[0]
    assert duplicate.first is duplicate.second[0] is duplicate.lookup is not model.lookup
    assert duplicate.first.module is duplicate.block.ebc is not model.block.ebc
    assert duplicate.plain is model.plain
    assert duplicate.generator is model.generator
    assert duplicate.teachers[0] is not model.teachers[0]
    assert duplicate.teachers[0].weight is model.teachers[0].weight


@pytest.mark.parametrize(
    "shared", [[], {}, set(), [1], Helper([]), deque(), (nn.Identity(), [])], ids=lambda value: type(value).__name__
)
def test_what_several_modules_share_is_copied_once(shared: Any) -> None:
    model = Block()
    model.own, model.ebc.losses, model.both = shared, shared, [shared]
    made: list[Any] = [copy_modules(model)[0], recfx.convert(model), recfx.unconvert(recfx.convert(model))]
    for duplicate in made:
        assert duplicate.own is duplicate.ebc.losses is duplicate.both[0] is not shared


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "array": (lambda: np.zeros(1), lambda value: value.__iadd__(1)),
    "deque": (lambda: deque([0]), lambda value: value.append(1)),
    "namespace": (lambda: Namespace(steps=[]), lambda value: value.steps.append(1)),
    "user dict": (UserDict, lambda value: value.update(a=1)),
    "random": (lambda: random.Random(0), lambda value: value.random()),
    "list": (lambda: [[0]], lambda value: value[0].append(1)),
    "tensor": (lambda: Helper(torch.zeros(1)), lambda value: value.module.add_(1)),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_what_a_copy_changes_is_its_own(kind: str) -> None:
    made, change = CHANGED[kind]

    class Changing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.value = made()

        def forward(self, features: KeyedJaggedTensor) -> Any:
            change(self.value)
            return self.ebc(features)

    state: Callable[[Any], Any] = pickle.dumps if kind != "tensor" else lambda value: value.module.tolist()
    model, before = Changing(), state(made())
    recfx.convert(model, (batch(5),))(batch(5))
    copy_modules(model)[0](batch(5))
    assert state(model.value) == before


ADVANCED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "averaged": (
        lambda: Helper(AveragedModel(nn.Linear(1, 1))),
        lambda value: value.module.update_parameters(value.module.module),
        lambda value: value.module.n_averaged.item(),
    ),
    "generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda value: torch.rand(1, generator=value),
        lambda value: value.get_state().tolist(),
    ),
    "listed tensor": (lambda: [torch.zeros(1)], lambda value: value[0].add_(1), lambda value: value[0].item()),
}


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("kind", ADVANCED)
def test_a_conversion_with_a_sample_advances_nothing(kind: str, inplace: bool) -> None:
    made, advance, state = ADVANCED[kind]

    class Advancing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.value = made()

        def forward(self, features: KeyedJaggedTensor) -> Any:
            advance(self.value)
            return self.ebc(features)

    model = Advancing()
    converted: Any = recfx.convert(model, (batch(5),), inplace=inplace)
    assert state(model.value) == state(converted.value) == state(made())
    converted(batch(5))
    assert state(converted.value) != state(made())


def test_a_hook_that_is_an_object_belongs_to_the_copy() -> None:
    class Watcher:
        def __init__(self, drop: nn.Module, seen: list[bool]) -> None:
            self.drop, self.seen = drop, seen

        def __call__(self, *_: Any) -> None:
            self.seen.append(self.drop.training)

    class Watched(Block):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.seen = nn.Dropout(), list[bool]()
            self.ebc.register_forward_hook(Watcher(self.drop, self.seen))

    model: Any = Watched()
    converted: Any = recfx.convert(model, (batch(5),)).eval()
    converted(batch(5))
    assert (converted.seen, model.seen) == ([False], [])


def as_subclass(model: nn.Module) -> nn.Module:
    class Doubled(Block):
        def forward(self, features: KeyedJaggedTensor) -> Any:
            return self.ebc(features).values() * 2

    doubled = Doubled.__new__(Doubled)
    doubled.__dict__.update(model.__dict__)
    return doubled


def replica_with_another_collection(model: Any) -> nn.Module:
    replica = model._replicate_for_data_parallel()
    replica.ebc = recfx.convert(collection())
    return replica  # type: ignore[no-any-return]


@pytest.mark.parametrize("made", [as_subclass, replica_with_another_collection])
def test_what_is_given_the_attributes_of_a_copy_runs_its_own_forward(made: Callable[[nn.Module], nn.Module]) -> None:
    converted, features = recfx.convert(Block()), batch(5)
    before, after = converted(features).values(), made(converted)(features)
    assert not torch.equal(after if isinstance(after, torch.Tensor) else after.values(), before)


def test_a_view_inside_an_object_stays_one() -> None:
    """``plain`` and buffers are the model's own in a copy, and so is their memory."""
    model = Block()
    model.plain = torch.zeros(2)
    model.register_buffer("steps", torch.zeros(2))
    model.register_buffer("sparse", torch.eye(2).to_sparse())  # has no storage
    model.views = Helper([model.plain[:1], model.steps[1:]])
    for duplicate in (copy_modules(model)[0], recfx.convert(model)):
        before = [view.item() for view in duplicate.views.module]
        model.plain += 1
        model.steps += 1
        assert [view.item() for view in duplicate.views.module] == [number + 1 for number in before]


class Mine(torch.optim.lr_scheduler.StepLR):
    pass


AROUND: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "helper": (Helper, lambda value: value.module),
    "list of helpers": (lambda value: [Helper(value)], lambda value: value[0].module),
    "dict and tuple": (lambda value: {"a": (value,)}, lambda value: value["a"][0]),
    "user dict": (lambda value: UserDict(a=value), lambda value: value["a"]),
}


@pytest.mark.parametrize("way", AROUND)
def test_parameters_and_optimizers_inside_objects_are_the_model_s_own(way: str) -> None:
    around, inside = AROUND[way]
    head = nn.BatchNorm1d(2)
    own: list[Any] = [head.weight, head.running_mean, nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)]
    own.append(torch.optim.SGD(own[2:], lr=1.0))
    model, held = Block(), {"head": head, "own": own, "scheduler": Mine(own[-1], 1), "lock": threading.Lock()}
    model.held = around(held)
    copied: Any = inside(recfx.convert(model).held)
    assert copied is not held
    assert copied["head"] is not head
    assert copied["lock"] is held["lock"]
    assert all(ours is value for ours, value in zip(copied["own"], own, strict=True))
    assert copied["head"].weight is head.weight
    assert copied["head"].running_mean is head.running_mean
    assert copied["scheduler"].optimizer is own[-1]


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("kind", [dict, list, set])
def test_a_module_that_is_a_container_as_well_keeps_its_contents(kind: Any, inplace: bool) -> None:
    class Both(Block, kind):  # type: ignore[misc]
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            return self is other

    model: Any = Both()
    filled: Any = {1: model.ebc} if kind is dict else [model.ebc]
    model.update(filled) if kind is not list else model.extend(filled)
    converted: Any = recfx.convert(model, inplace=inplace)
    if kind is not set or not inplace:
        assert list(converted.values() if kind is dict else converted) == [converted.ebc]
    assert isinstance(converted.ebc, HashEmbeddingBagCollection)


@pytest.mark.parametrize("way", ["attribute", "list", "cache", "hook", "weak reference", "weak method", "none"])
def test_closures_that_go_on_using_the_original_are_reported(way: str) -> None:
    model = Block()
    model.drop = nn.Dropout()
    uses: Any = lambda *args: model.drop(*args)  # noqa: E731
    uses = {
        "weak reference": weakref.ref(model.drop),
        "weak method": weakref.WeakMethod(model.drop.forward),
        "list": [uses],
        "cache": functools.lru_cache(uses),
    }.get(way, uses)
    if way == "hook":
        model.ebc.register_forward_pre_hook(lambda *_: uses and model.drop and None)
    elif way != "none":
        model.act = uses
    path, is_copy = ("ebc" if way == "hook" else ""), way != "none"
    with pytest.warns(recfx.RecfxWarning, match="refers_to_original") if is_copy else contextlib.nullcontext():
        converted = recfx.convert(model)
    reasons = [(reason.code, reason.path) for reason in recfx.explain(converted).reasons]
    assert (("refers_to_original", path) in reasons) == is_copy
    recfx.convert(model, inplace=True)


@pytest.mark.parametrize("hashing", [None, recfx.HashConfig.raw_ids()], ids=["rows", "raw ids"])
def test_a_default_device_of_meta_changes_nothing(hashing: recfx.HashConfig | None) -> None:
    model, sample = Block(), (batch(5),)
    with torch.device("meta"):
        converted = recfx.convert(model, sample, hashing=hashing)
        assert recfx.verify(model, converted, sample).ok
    assert {parameter.device.type for parameter in converted.parameters()} == {"cpu"}
