"""Proxies that are what they stand for: ``isinstance`` and ``hasattr`` answer for the value that the sample has there.

What a proxy cannot answer raises, and the tracer remembers it: code that handles the error has taken another branch.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any, cast
from unittest import mock

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute, TraceError
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.collections.collection import UnshardedCollection
from recfx.collections.copy_modules import copy_modules, copy_with_tensors, own_modules
from recfx.collections.kinds import standard_kind

UNKNOWN = object()


class Observed:
    """What the nodes of a graph hold for the sample, as far as that can be computed while the graph is made, in a
    thread of its own: what is patched for a trace leaves other threads alone. Nothing changes in ``root``, which is
    traced, but ``arguments``, by placeholder, may. ``collections`` are given by ``id``.
    """

    def __init__(self, root: nn.Module, arguments: dict[str, Any], collections: set[int]) -> None:
        self._root, self._arguments, self._collections = root, arguments, collections
        self._attributes: dict[str, Any] = {}
        self._values: dict[fx.Node, Any] = {}
        self._thread = ThreadPoolExecutor(1)
        self.assigned: list[tuple[nn.Module, str]] = []  # the plain attributes that calls of modules have assigned

    def add(self, node: fx.Node) -> None:
        with contextlib.suppress(Exception):  # whatever the user's code raises; also a node of which nothing is known
            self._values[node] = self._thread.submit(self._compute, node).result()

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


_CLASSES = (torch.Tensor, JaggedTensor, KeyedJaggedTensor, KeyedTensor, int, float)
"""What a proxy may say that it is: torch.fx looks into proxies that say that they are containers."""
_CONSTANTS = frozenset({"dim", "dtype", "is_complex", "is_floating_point", "ndim"})


def remembered(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose errors the tracer remembers."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            tracer = self.tracer if issubclass(type(self), fx.Proxy) else self
            tracer.raised = getattr(tracer, "raised", None) or error
            raise

    return call


class InPlaceProxy(fx.Proxy):
    """A proxy for which ``x += 1`` is what it is for tensors: a change of ``x`` in place, and not a new value."""

    @property
    def value(self) -> Any:
        """What it stands for, or ``UNKNOWN``."""
        observed = getattr(self.tracer, "observed", None)
        return UNKNOWN if observed is None else observed[self.node]

    @property
    def __class__(self) -> Any:
        value = self.value
        return type(value) if isinstance(value, _CLASSES) else type(self)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("a proxy keeps its class")

    def __getattr__(self, name: str) -> Any:
        value, tracer = self.value, cast(Any, self.tracer)
        if value is UNKNOWN:
            return AttributeProxy(self, name)
        if name in ("_is_param", "_is_buffer"):  # for `isinstance`
            return getattr(value, name, False)
        attribute = getattr(value, name)  # raises what the value raises
        if name in _CONSTANTS and isinstance(value, torch.Tensor) and tracer.is_constant(self.node, name):
            return attribute
        proxy = AttributeProxy(self, name)
        return tracer.create_proxy("call_function", getattr, (self, name), {}) if _is_data(attribute) else proxy

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if orig_method is torch.Tensor.__setitem__:  # of a tensor that is no proxy
            tracer = next(arg.tracer for arg in args if issubclass(type(arg), fx.Proxy))
            return tracer.create_proxy("call_function", operator.setitem, args, {})
        return super().__torch_function__(orig_method, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The value itself, and not a copy of the graph; of a tensor, a clone."""
        return self.clone() if isinstance(self.value, torch.Tensor) else self

    @remembered
    def __index__(self) -> int:
        tracer: Any = self.tracer
        return int(tracer.fixed(self, number=True))

    __int__ = __index__

    @remembered
    def __len__(self) -> int:
        tracer: Any = self.tracer
        known = tracer.fixed(self)
        return known if isinstance(known, int) else len(known)


def _is_data(attribute: Any) -> bool:
    return isinstance(attribute, _CLASSES) and not isinstance(attribute, bool)


def _in_place(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def change(self: fx.Proxy, *others: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *others), {})

    return change


for _name in fx.graph.inplace_methods:
    setattr(InPlaceProxy, f"__{_name}__", _in_place(_name))


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: fx.Proxy, *args: Any) -> Any:
        raise TraceError(f"Python needs a value that is traced, for {name}")

    return remembered(refuse)


for _name in ("__hash__", "__str__", "__format__", "__float__", "__complex__"):
    setattr(InPlaceProxy, _name, _refused(_name))


class Assigned:
    """An attribute that a call has assigned, of which a graph has no value."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self, *args: Any) -> Any:
        raise TraceError(f"Python needs attribute {self._name}, which a module that is not traced assigns")

    __bool__ = __len__ = __iter__ = __index__ = __int__ = __float__ = __call__ = __getitem__ = __eq__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _raise
    __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __contains__ = __str__ = _raise


class AttributeProxy(InPlaceProxy, Attribute):
    """A proxy of an attribute, which becomes a node if it is used, and is not called."""

    def __init__(self, root: fx.Proxy, attr: str) -> None:
        Attribute.__init__(self, root, attr)

    @property
    def value(self) -> Any:
        return UNKNOWN if self._node is None else super().value


class TensorProxy(InPlaceProxy, torch.Tensor):  # type: ignore[misc]  # which both have `__abs__` and `__repr__`
    """A proxy that is a tensor, for Python and for C++, but has no values: an operator that would read some raises."""

    @staticmethod
    def __new__(cls: Any, node: fx.Node, tracer: fx.Tracer, like: torch.Tensor) -> Any:
        # "sizes": C++ code, such as a function of TorchScript, asks `__torch_dispatch__` for sizes, too.
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, dispatch_sizes_strides_policy="sizes"
        )

    def __init__(self, node: fx.Node, tracer: fx.Tracer, like: torch.Tensor) -> None:
        fx.Proxy.__init__(self, node, tracer)

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_PROXIES or name in object.__getattribute__(self, "__dict__"):
            return object.__getattribute__(self, name)
        return InPlaceProxy.__getattr__(self, name)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TraceError(f"{func} would need values while it is traced")


_OF_PROXIES = frozenset(dir(InPlaceProxy))


def proxy_of(node: fx.Node, tracer: Any) -> InPlaceProxy:
    """A proxy of a new node."""
    if tracer.observed is None:
        return InPlaceProxy(node, tracer)
    for observed in (tracer.observed, *tracer.other_calls):
        observed.add(node)
    value = tracer.observed[node]
    is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return TensorProxy(node, tracer, value) if is_dense else InPlaceProxy(node, tracer)
