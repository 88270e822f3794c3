"""What the nodes of a graph hold for the sample, which proxies are asked for while the graph is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.fx.proxy import TraceError

from recfx.collections.collection import UnshardedCollection
from recfx.collections.copy_modules import copy_modules, copy_with_tensors, own_modules
from recfx.collections.kinds import standard_kind

UNKNOWN = object()


class Observed:
    """What the nodes of a graph hold for the sample, as far as that can be computed while the graph is made.

    A thread of its own computes it, because what is patched for a trace leaves other threads alone.

    Args:
        root: the module that is traced; nothing in it changes.
        arguments: what the placeholders hold, which may change.
        collections: the ``id`` of each collection.

    Attributes:
        assigned: the modules whose plain attributes a call of a module has assigned, with the attributes' names.
    """

    def __init__(self, root: nn.Module, arguments: dict[str, Any], collections: set[int]) -> None:
        self._root, self._arguments, self._collections = root, arguments, collections
        self._attributes: dict[str, Any] = {}
        self._values: dict[fx.Node, Any] = {}
        self._thread = ThreadPoolExecutor(1)
        self.assigned: list[tuple[nn.Module, str]] = []

    def add(self, node: fx.Node) -> None:
        """Compute what a new node holds."""
        try:
            self._values[node] = self._thread.submit(self._compute, node).result()
        except Exception:  # whatever the user's code raises; also a node of which nothing is known
            self._values[node] = UNKNOWN

    def __getitem__(self, node: fx.Node) -> Any:
        return self._values.get(node, UNKNOWN)

    def is_changed(self, attribute: str) -> bool:
        """Whether a node has written into an attribute."""
        return bool(self._attributes[attribute]._version)

    def end(self) -> None:
        self._thread.shutdown()

    def _known(self, node: fx.Node) -> Any:
        if self[node] is UNKNOWN:
            raise KeyError(node.name)
        return self[node]

    def _compute(self, node: fx.Node) -> Any:
        with torch.no_grad():
            args: Any = map_arg(node.args, self._known)
            kwargs = map_arg(node.kwargs, self._known)
            target: Any = node.target
            if node.op == "placeholder":
                return self._arguments[target]
            if node.op == "get_attr":
                value = attrgetter(target)(self._root)
                is_module = isinstance(value, nn.Module)  # a collection with hooks, whose `forward` the graph calls
                return self._callable(value) if is_module else self._attributes.setdefault(target, _own(value))
            if node.op == "call_module":
                module = self._root.get_submodule(target)
                called = self._callable(module)
                with contextlib.nullcontext() if id(module) in self._collections else self._noted(module, called):
                    return called(*args, **kwargs)
            if node.op == "call_method":
                target, args = getattr(args[0], target), args[1:]
            return target(*args, **kwargs)

    @contextlib.contextmanager
    def _noted(self, module: nn.Module, copy: nn.Module) -> Iterator[None]:
        """Note what the copy of a module assigns, also if it has that value already."""
        originals = dict(zip(map(id, copy.modules()), module.modules(), strict=True))
        assign = nn.Module.__setattr__

        def assign_and_note(part: nn.Module, name: str, value: Any) -> None:
            assign(part, name, value)
            if id(part) in originals and name in part.__dict__:
                self.assigned.append((originals[id(part)], name))

        with mock.patch.object(nn.Module, "__setattr__", assign_and_note):
            yield

    def _callable(self, module: nn.Module) -> nn.Module:
        """A copy of a module, which may change itself."""
        if id(module) not in self._collections:
            if self._collections.isdisjoint(map(id, module.modules())):
                return copy_with_tensors(module)
            raise TraceError("it holds collections")
        if not isinstance(module, UnshardedCollection) and standard_kind(module) is None:
            raise TraceError("what it does to itself is not known")
        copy, _ = copy_modules(module)
        for part in own_modules(copy):
            part.training = False  # ids get no rows
            small = {name: value for name, value in part._buffers.items() if value is not None and value.numel() < 1024}
            part._buffers.update({name: value.clone() for name, value in small.items()})  # counts of calls
        return copy


def _own(value: Any) -> Any:
    """A tensor like an attribute; in the place of a parameter, which may be a table, zeros that take no memory."""
    if not isinstance(value, nn.Parameter):
        return value.detach().clone()
    like: Any = value.detach().new_zeros(()).expand(value.shape)
    like._is_param = True  # for which `isinstance` asks
    return like
