"""What Python objects refer to, kind by kind: the edges that ``recfx.collections.find_references`` follows."""

from __future__ import annotations

import collections
import concurrent.futures
import enum
import functools
import gc
import itertools
import queue
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule

from recfx.errors import type_of
from recfx.runtime.hooks import MODULE_HOOKS, holds_hooks

REGISTRIES = ("_parameters", "_buffers", "_modules")

_OF_TORCH = frozenset((*REGISTRIES, *filter(holds_hooks, MODULE_HOOKS), "_compiled_call_impl"))

Edge = tuple[str, Any]

WEAK_REFERENCES = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
WEAK_CONTAINERS = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
METHODS_IN_C = (types.BuiltinMethodType, types.MethodWrapperType)
CACHE: type[Any] = type(functools.lru_cache(lambda: None))
# Instances of these, and of classes derived from them in Python, can be created empty and then filled.
LAYOUTS: tuple[type[Any], ...] = (
    object, dict, list, tuple, set, frozenset, collections.deque, collections.OrderedDict, collections.defaultdict,
    collections.Counter, types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap,
)  # fmt: skip

_ATOM_TYPES = frozenset((bool, int, float, complex, str, bytes, type(None), torch.Tensor, nn.Parameter))
_ATOMS = (torch.Tensor, type, types.ModuleType, types.CodeType, types.FrameType, enum.Enum)
# Objects of these packages are not searched: they hold none of the user's modules, or must not be copied. pytest holds
# the models of running tests, and every ``assert`` that it has rewritten reads it; but no forward calls a model there.
_OPAQUE = frozenset(
    {"torch", "torchrec", "fbgemm_gpu", "tensordict", "numpy", "pandas", "pyarrow", "recfx", "_pytest", "builtins"}
) | frozenset(sys.stdlib_module_names)
# These have their own running state: a second one would not be the same.
_ALIVE = (threading.Thread, queue.Queue, queue.SimpleQueue, concurrent.futures.Executor, concurrent.futures.Future)
_OF_A_STARTED_THREAD = ("_target", "_args", "_kwargs")  # what it runs, once; nothing can call this through it again
_FOLLOWED = (
    nn.Module, types.FunctionType, types.MethodType, types.MappingProxyType, functools.partial, CACHE, *METHODS_IN_C,
    *WEAK_REFERENCES, *WEAK_CONTAINERS,
)  # fmt: skip
_ITERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, zip, map, filter, enumerate, reversed)


def is_atom(value: Any) -> bool:
    """Whether ``value`` cannot refer to a module, or is not searched."""
    kind: Any = type(value)  # not isinstance(), which asks what a proxy refers to, even if that is gone
    return kind in _ATOM_TYPES or issubclass(kind, _ATOMS) or _is_opaque(kind)


@functools.lru_cache(maxsize=1024)
def _is_opaque(kind: Any) -> bool:
    """Whether ``edges_of`` finds nothing in instances of ``kind``; models hold thousands of settings."""
    followed = issubclass(kind, (*_FOLLOWED, *_ALIVE, BaseException)) or kind in LAYOUTS or _is_iterator(kind)
    return not followed and not is_users(kind.__module__)


def is_users(module: object) -> bool:
    """Whether code of that ``__module__`` belongs neither to Python nor to torch and related packages."""
    return str(module).split(".")[0] not in _OPAQUE


def attributes(module: nn.Module) -> Iterator[Edge]:
    """The plain attributes of a module, by name: no registries, no hooks, and nothing that ``torch.compile`` made."""
    if isinstance(module, OptimizedModule):
        return
    for name, value in module.__dict__.items():
        if name not in _OF_TORCH and not holds_hooks(name):
            yield name, value
    yield from slots(module)


def hook_registries(module: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    """The dicts of hooks of a module that are not empty, by name."""
    for name, value in module.__dict__.items():
        if holds_hooks(name) and isinstance(value, dict) and value:
            yield name, value


def hooks_of(module: nn.Module) -> Iterator[Edge]:
    """What was registered as hooks of a module: functions, bound methods and other objects."""
    for name, hooks in hook_registries(module):
        yield from ((f"{name}[{key!r}]", hook) for key, hook in hooks.items() if not is_atom(hook))


def slots(value: Any) -> Iterator[Edge]:
    """The values in the ``__slots__`` of an object, by name."""
    for kind in type(value).__mro__:
        if "__slots__" in kind.__dict__:
            for name, member in kind.__dict__.items():
                if isinstance(member, types.MemberDescriptorType):
                    try:
                        yield name, member.__get__(value)
                    except AttributeError:  # not set
                        continue


def set_slot(value: Any, name: str, content: Any) -> None:
    """Fill a slot, also of a frozen dataclass."""
    for kind in type(value).__mro__:
        member = kind.__dict__.get(name)
        if "__slots__" in kind.__dict__ and isinstance(member, types.MemberDescriptorType):
            member.__set__(value, content)
            return


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set a plain attribute, in ``__dict__`` or in a slot."""
    if any(name in kind.__dict__ and "__slots__" in kind.__dict__ for kind in type(module).__mro__):
        set_slot(module, name, value)
    else:
        module.__dict__[name] = value


def is_shared(module: nn.Module) -> bool:
    """Whether a module is never copied: ScriptModules, and managed collisions.

    Managed collisions keep what they have seen partly in buffers and partly in Python numbers: a copy that shares the
    buffers but counts by itself would corrupt them.
    """
    return isinstance(module, (torch.jit.ScriptModule, ManagedCollisionCollection, ManagedCollisionModule))


def own_modules(root: nn.Module) -> list[nn.Module]:
    """The modules of a copy that it does not share with the original."""
    shared = {id(inside) for module in root.modules() if is_shared(module) for inside in module.modules()}
    return [module for module in root.modules() if id(module) not in shared]


def empty_copy(module: nn.Module) -> nn.Module:
    """An empty module object of the same class."""
    if is_shared(module):
        return module
    # Not __new__ of the class: that of GraphModule makes a new class for each instance.
    return object.__new__(type(module))


def edges_of(value: Any) -> Iterator[Edge]:
    """What ``value`` refers to, each with how it is written in Python."""
    kind = type(value)
    if issubclass(kind, WEAK_REFERENCES):  # first, because a proxy claims to be the object it refers to
        yield "()", _referent(value)
    elif isinstance(value, nn.Module):
        if not isinstance(value, torch.jit.ScriptModule):
            yield from ((f".{name}", child) for name, child in attributes(value))
            yield from ((f".{name}", child) for name, child in value._modules.items() if child is not None)
    elif isinstance(value, types.FunctionType):
        yield from _edges_of_function(value)
    elif isinstance(value, types.MethodType):
        yield from ((" -> bound to", value.__self__), ("", value.__func__))
    elif isinstance(value, METHODS_IN_C):
        yield " -> bound to", value.__self__
    elif isinstance(value, functools.partial):
        yield " -> function", value.func
        yield from ((f" -> argument {place}", item) for place, item in enumerate(value.args))
        yield from ((f" -> argument {name!r}", item) for name, item in value.keywords.items())
    elif kind in WEAK_CONTAINERS:
        yield from (("[...]", item) for item in weak_items(value))
    elif isinstance(value, CACHE):
        yield " -> function", value.__wrapped__
    elif isinstance(value, types.MappingProxyType) or _is_iterator(type(value)):
        yield from (("[...]", item) for item in gc.get_referents(value))
    elif is_users(kind.__module__) or isinstance(value, (*_ALIVE, BaseException)) or kind in LAYOUTS:
        yield from _items(value)
        yield from ((f".{name}", item) for name, item in slots(value))
        skipped = _OF_A_STARTED_THREAD if isinstance(value, threading.Thread) and value.ident is not None else ()
        for name, item in getattr(value, "__dict__", {}).items():
            if name not in skipped:
                yield f".{name}", item


def why_fixed(value: Any) -> str:
    """Why what ``value`` refers to can neither be changed nor copied, or ``""``."""
    kind = type(value)
    if _is_iterator(kind):
        return f"{type_of(value)}, whose variables cannot be set from outside"
    if issubclass(kind, functools.partial) and kind is not functools.partial:
        return f"{type_of(value)}, which is a kind of functools.partial"
    if issubclass(kind, _FOLLOWED) or (layout_of(kind) is not None and not issubclass(kind, _ALIVE)):
        return ""
    return f"{type_of(value)}, of which no copy can be made"


def layout_of(kind: type[Any]) -> type[Any] | None:
    """Which of ``LAYOUTS`` instances of ``kind`` have; None for instances of other classes written in C."""
    base: type[Any] | None = kind
    while base is not None and base not in LAYOUTS:
        if not base.__flags__ & (1 << 9):  # a class written in C
            return None
        base = base.__base__
    return base


def weak_items(value: Any) -> list[Any]:
    """The live keys and values in a weak container."""
    if isinstance(value, weakref.WeakSet):
        return list(value)
    return [item for pair in value.items() for item in pair]


def _edges_of_function(function: types.FunctionType) -> Iterator[Edge]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" -> closure variable {name!r}", cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield from ((" -> default argument", item) for item in function.__defaults__ or ())
    yield from ((f" -> default argument {name!r}", item) for name, item in (function.__kwdefaults__ or {}).items())
    yield from ((f".{name}", item) for name, item in function.__dict__.items())


def _referent(value: Any) -> Any:
    if issubclass(type(value), weakref.WeakMethod):  # every call makes a new bound method
        return getattr(value(), "__self__", None)
    if issubclass(type(value), weakref.ref):
        return value()
    try:
        return value.__repr__.__self__  # a proxy answers as the object it refers to
    except ReferenceError:
        return None


def _items(value: Any) -> Iterator[Edge]:
    if isinstance(value, dict):
        yield from (("[...]", key) for key in dict.keys(value) if not is_atom(key))
        for key, item in dict.items(value):
            if not is_atom(item):
                yield f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", item
        if isinstance(value, collections.defaultdict):
            yield ".default_factory", value.default_factory
    elif isinstance(value, (list, tuple, collections.deque)):
        yield from ((f"[{place}]", item) for place, item in enumerate(value) if not is_atom(item))
    elif isinstance(value, BaseException):
        yield ".args", value.args
    elif isinstance(value, (set, frozenset)):
        yield from (("[...]", item) for item in value if not is_atom(item))


def _is_iterator(kind: type[Any]) -> bool:
    return issubclass(kind, _ITERATORS) or (
        kind.__module__ in ("builtins", itertools.__name__) and hasattr(kind, "__next__")
    )
