"""Redirects references from modules to other modules, wherever Python objects keep them."""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from recfx.collections.find_references import References
from recfx.collections.object_kinds import (
    CACHE,
    METHODS_IN_C,
    REGISTRIES,
    WEAK_CONTAINERS,
    WEAK_REFERENCES,
    attributes,
    edges_of,
    empty_copy,
    is_atom,
    is_shared,
    layout_of,
    set_attribute,
    set_slot,
    slots,
    why_fixed,
)

_REMADE = (types.FunctionType, types.MethodType, functools.partial)
_OWN_CONTAINERS = (list, dict, set, tuple, collections.OrderedDict, collections.defaultdict)


class Rewiring:
    """Redirects plain attributes to other modules.

    Args:
        modules: the replacement of each module, by ``id`` of the module.
        references: the paths to those modules.
        inplace: change what can be changed; otherwise everything on a path is copied, and so are plain containers.
    """

    def __init__(self, modules: Mapping[int, nn.Module], references: References, inplace: bool = False) -> None:
        self._references, self._inplace = references, inplace
        self.known: dict[int, Any] = dict(modules)
        self._alive: list[Any] = []
        self._remade: set[int] = set()  # hooks, and what they call
        self._unfilled: collections.deque[Callable[[], None]] = collections.deque()
        self._unhashed: collections.deque[Callable[[], None]] = collections.deque()

    def leads(self, value: Any) -> bool:
        """Whether ``value`` is, or refers to, a module that is replaced."""
        return id(value) in self.known or id(value) in self._remade or self._references.reaches(value)

    def rewired(self, value: Any) -> Any:
        """The replacement of ``value``; complete after ``finish``."""
        if is_atom(value):
            return value
        if id(value) in self.known:
            return self.known[id(value)]
        copied = type(value) is types.MethodType or (type(value) in _OWN_CONTAINERS and not self._inplace)
        if not copied and not self.leads(value):
            return value
        replacement = self._make(value)
        self._alive.append(value)
        self.known[id(value)] = replacement
        return replacement

    def rewired_hook(self, hook: Any) -> Any:
        """A hook that runs on the replacements; complete after ``finish``.

        Functions, bound methods and partials are made anew if modules are among what they hold. Other objects that
        only hooks hold stay the user's own: what watches a model also watches the converted one.
        """
        self._find_remade(hook)
        return self.rewired(hook) if self.leads(hook) else hook

    def _find_remade(self, hook: Any) -> None:
        """Note the functions, bound methods and partials behind a hook from which others of them lead to modules."""
        items_of: dict[int, list[Any]] = {}
        waiting = [hook]
        while waiting:
            value = waiting.pop()
            if isinstance(value, _REMADE) and id(value) not in items_of and not why_fixed(value):
                self._alive.append(value)
                items_of[id(value)] = [item for _, item in edges_of(value)]
                waiting += items_of[id(value)]
        before = -1
        while before < len(self._remade):
            before = len(self._remade)
            self._remade |= {key for key, items in items_of.items() if any(map(self.leads, items))}

    def finish(self) -> None:
        """Fill the objects that were made. Those that hash their content come last, when that content is complete."""
        while self._unfilled or self._unhashed:
            (self._unfilled or self._unhashed).popleft()()

    def _make(self, value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, WEAK_REFERENCES):
            return self._weak_reference(value)
        if isinstance(value, nn.Module):
            return value if is_shared(value) else self._module(value)
        if why_fixed(value):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return rebound_method(value, self.rewired(value.__self__), self.rewired(value.__func__))
        if isinstance(value, METHODS_IN_C):
            return getattr(self.rewired(value.__self__), value.__name__)
        if isinstance(value, functools.partial):
            keywords = {name: self.rewired(item) for name, item in value.keywords.items()}
            return functools.partial(self.rewired(value.func), *map(self.rewired, value.args), **keywords)
        if isinstance(value, CACHE):
            wrapped: Any = value
            return functools.lru_cache(**wrapped.cache_parameters())(self.rewired(wrapped.__wrapped__))
        if isinstance(value, types.MappingProxyType):
            return types.MappingProxyType({name: self.rewired(item) for name, item in value.items()})
        if kind in WEAK_CONTAINERS:
            return self._weak_container(value)
        return self._object(value)

    def _object(self, value: Any) -> Any:
        """Handle containers, helper objects, and objects that are both."""
        kind, layout = type(value), layout_of(type(value))
        if layout in (tuple, frozenset):
            items = [self.rewired(item) for item in value]
            if kind is layout and all(one is other for one, other in zip(items, value, strict=True)):
                return value
            assert layout is not None
            duplicate = layout.__new__(kind, items)
        elif self._inplace:
            duplicate = value
        elif layout is collections.deque:
            duplicate = collections.deque.__new__(kind)
            collections.deque.__init__(duplicate, (), value.maxlen)
        else:
            layout_class: Any = layout
            duplicate = layout_class.__new__(kind)
        if layout not in (tuple, frozenset):
            later = self._unhashed if isinstance(value, (dict, set)) else self._unfilled
            later.append(functools.partial(self._fill_container, value, duplicate))
        if getattr(value, "__dict__", None) or any(True for _ in slots(value)):
            self._unfilled.append(functools.partial(self._fill_attributes, value, duplicate))
        return duplicate

    def _fill_container(self, value: Any, duplicate: Any) -> None:
        if isinstance(value, dict):
            items = [(self.rewired(key), self.rewired(item)) for key, item in dict.items(value)]
            base: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            base.clear(duplicate)
            for key, item in items:
                base.__setitem__(duplicate, key, item)
            if isinstance(value, collections.defaultdict):
                duplicate.default_factory = self.rewired(value.default_factory)
        elif isinstance(value, list):
            list.__setitem__(duplicate, slice(None), [self.rewired(item) for item in value])
        elif isinstance(value, (set, collections.deque)):
            rewired: list[Any] = [self.rewired(item) for item in value]
            duplicate.clear()
            duplicate.update(rewired) if isinstance(value, set) else duplicate.extend(rewired)

    def _fill_attributes(self, value: Any, duplicate: Any) -> None:
        for name, item in list(getattr(value, "__dict__", {}).items()):
            duplicate.__dict__[name] = self.rewired(item)
        for name, item in list(slots(value)):
            set_slot(duplicate, name, self.rewired(item))

    def _module(self, value: nn.Module) -> nn.Module:
        """Handle a module that is not a child of the model but holds one."""
        duplicate = value if self._inplace else empty_copy(value)

        def fill() -> None:
            if duplicate is not value:
                duplicate.__dict__.update(value.__dict__)
                for name in REGISTRIES:
                    duplicate.__dict__[name] = dict(value.__dict__[name])
            for name, child in value._modules.items():
                duplicate._modules[name] = self.rewired(child)
            for name, item in list(attributes(value)):
                set_attribute(duplicate, name, self.rewired(item))
            if isinstance(duplicate, OptimizedModule):
                duplicate._initialize()

        self._unfilled.append(fill)
        return duplicate

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """Copy a function, so that it reads other variables; those of the user's own function stay as they are."""
        closure = value.__closure__ and tuple(self._cell(cell) for cell in value.__closure__)
        defaults = value.__defaults__ and tuple(self.rewired(item) for item in value.__defaults__)
        duplicate = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, closure)
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(duplicate, name, getattr(value, name))

        def fill() -> None:
            keywords = value.__kwdefaults__
            duplicate.__kwdefaults__ = keywords and {name: self.rewired(item) for name, item in keywords.items()}
            duplicate.__dict__.update({name: self.rewired(item) for name, item in value.__dict__.items()})

        self._unfilled.append(fill)
        return duplicate

    def _cell(self, cell: types.CellType) -> types.CellType:
        """A new variable if it refers to a module that is replaced, or if a copy's code could put one there; otherwise
        the same one.
        """
        try:
            content = cell.cell_contents
        except ValueError:  # not set yet
            return cell
        if id(cell) in self.known:
            replacement: types.CellType = self.known[id(cell)]
            return replacement
        remembers = type(content) in _OWN_CONTAINERS and not self._inplace
        if not remembers and not self.leads(content):
            return cell
        replacement = self.known[id(cell)] = types.CellType()
        self._alive.append(cell)
        self._unfilled.append(lambda: setattr(replacement, "cell_contents", self.rewired(content)))
        return replacement

    def _weak_reference(self, value: Any) -> Any:
        if isinstance(value, weakref.WeakMethod):
            method: Any = value()
            return weakref.WeakMethod(rebound_method(method, self.rewired(method.__self__)))
        for _, referent in edges_of(value):
            other = self.rewired(referent)
            if isinstance(value, weakref.ref):
                return weakref.ref(other, value.__callback__)
            return weakref.proxy(other)
        return value

    def _weak_container(self, value: Any) -> Any:
        duplicate = value if self._inplace else type(value)()

        def fill() -> None:
            if isinstance(value, weakref.WeakSet):
                items: list[Any] = [self.rewired(item) for item in value]
            else:
                items = [(self.rewired(key), self.rewired(item)) for key, item in value.items()]
            duplicate.clear()
            duplicate.update(items)

        self._unhashed.append(fill)
        return duplicate


def rebound_method(method: types.MethodType, owner: Any, function: Any = None) -> Any:
    """Bind a method, or ``function``, to another object, whose class may have its own method of that name."""
    function = method.__func__ if function is None else function
    name = getattr(function, "__name__", "")
    if type(owner) is not type(method.__self__) and getattr(type(method.__self__), name, None) is function:
        return getattr(owner, name)
    return types.MethodType(function, owner)
