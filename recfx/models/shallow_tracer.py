"""Shallow whole-model tracing: only modules that hold a collection are entered; all others are leaves.

A module that cannot be traced is rolled back to one opaque leaf, with the reason.
"""

import operator
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import SEQUENCE, kind_of
from recfx.errors import Diagnostic, InputError, short
from recfx.ir.meta import SourceLocation
from recfx.models.attribute_reads import AttributeReads
from recfx.models.proxies import UNKNOWN, InPlaceProxy, Observed, proxy_of, remembered
from recfx.runtime.base import has_forward_hooks

NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
"""The folders of code that is not the user's."""


class LostByTracing(Exception):
    """Something that a traced graph would not repeat."""


def computed_from_state() -> LostByTracing:
    """The error where a graph would have a value from the time of the trace for ever."""
    return LostByTracing("what the code computes from parameters() or buffers() would be a constant of the graph")


_VALUE_FREE = frozenset(
    {torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like}
    | {getattr(torch.Tensor, f"new_{name}") for name in ("zeros", "ones", "full", "empty", "tensor")}
)
"""What takes only dtypes, devices and shapes from a tensor."""
_READ_AS_NUMBERS = frozenset(
    getattr(torch.Tensor, name) for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")
)


class Computed(TorchFunctionMode):
    """Knows what code computes from the parameters and buffers of ``root`` themselves, and not from proxies of them,
    as it does if it iterates over ``parameters()``: a graph would have the values of the trace for ever.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._state = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        self._computed = WeakTensorKeyDictionary()

    def __contains__(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value in self._computed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _VALUE_FREE or not any(
            id(value) in self._state or value in self for value in _leaves((args, kwargs))
        ):
            return output
        if func in _READ_AS_NUMBERS:
            raise computed_from_state()
        for value in _leaves(output):
            if isinstance(value, torch.Tensor):
                self._computed[value] = None
        return output


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    map_aggregate(value, leaves.append)
    return leaves


class UnpicklingTracer(fx.Tracer):
    """Traces the code of a pickled graph again, where what changes in place has to stay so."""

    proxy_buffer_attributes = True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return InPlaceProxy(node, self)


def _keys_of_output(collection: nn.Module) -> list[str] | None:
    """The keys of the dict that a collection returns; None if it returns something else, or a hook may."""
    # A sharded one returns an awaitable, and one that is kept or refused may return anything.
    is_known = isinstance(collection, UnshardedCollection) or type(collection).forward is SEQUENCE.standard.forward
    if not is_known or kind_of(collection) is not SEQUENCE or has_forward_hooks(collection):
        return None
    by_table: Any = collection.embedding_names_by_table()  # type: ignore[operator]
    return [name for names in by_table for name in names]


class ShallowTracer(fx.Tracer):
    """A tracer that enters only modules that hold one of ``leaves``, the collections (by ``id``), and are not named in
    ``opaque``. Values that are ``computed`` from the state of the model are not made constants; numbers and keys that
    Python needs are, if they are the same in all calls that are observed, and each batch is checked for them. So are
    the attributes that ``reads`` records.
    """

    def __init__(
        self,
        leaves: set[int],
        opaque: frozenset[str] = frozenset(),
        computed: Computed | None = None,
        reads: AttributeReads | None = None,
    ) -> None:
        super().__init__()
        self._computed, self._reads = computed, reads
        self._thread = threading.get_ident()
        self.observed: Any = None
        self.other_calls: list[Observed] = []
        self.raised: Exception | None = None
        """The first error of a proxy in the code that is traced, which may have handled it."""
        self.record_stack_traces = True
        self.proxy_buffer_attributes = True  # buffers become nodes, so the trace itself never changes them
        self.rollbacks: list[Diagnostic] = []
        self.entered: list[str] = []
        self.leaves = leaves
        self._opaque = opaque
        self._holds: dict[int, bool] = {}
        self._parameter_proxies: dict[str, Any] = {}
        self._items: list[fx.Node] = []
        self._buffers: list[tuple[str, dict[str, Any], str, Any]] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if id(m) in self.leaves or module_qualified_name in self._opaque:
            return True
        holds = self._holds.get(id(m))
        if holds is None:
            holds = self._holds[id(m)] = any(id(child) in self.leaves for child in m.modules())
        return not holds

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return proxy_of(node, self)

    def is_constant(self, node: fx.Node, attribute: str) -> bool:
        """Whether an attribute of a tensor may be a constant of the graph."""
        return False

    to_bool = remembered(fx.Tracer.to_bool)

    @remembered
    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        """Do what torch.fx does, but not where a module that is not entered runs, for ``Observed``, into a proxy."""
        if threading.get_ident() != self._thread:
            raise TraceError("a module that the trace does not enter reads an attribute that the code assigns")
        return super().create_proxy(*args, **kwargs)

    def fixed(self, proxy: fx.Proxy, *, number: bool = False) -> Any:
        """The value of a proxy, as :func:`fixed_value` makes it; if a ``number`` is needed, not how many items there
        are. ``TraceError`` if it is not known, or not the same for all batches.
        """
        runs = [] if self.observed is None else [self.observed, *self.other_calls]
        value, *others = [run[proxy.node] for run in runs] or [UNKNOWN]
        fixed = fixed_value(value) if isinstance(value, int) or not number else None
        # A model need not take every batch, and then the comparison leaves it out as well.
        is_same = all(other is UNKNOWN or fixed_value(other) == fixed for other in others)
        if self.module_stack or fixed is None or not is_same or _reads_values(proxy.node):
            message = f"Python needs the value of {proxy.node.name} while it is traced, "
            raise TraceError(f"{message}which is not the same for all batches")
        expect_constant(proxy, fixed, "")
        return fixed

    @remembered
    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """The keys, if there are keys; otherwise proxies of the items."""
        items = items_of(obj)
        known = self.fixed(items)
        return iter([operator.getitem(items, place) for place in range(known)] if isinstance(known, int) else known)

    def create_arg(self, a: Any) -> Any:
        """Do what torch.fx does, which makes a constant of a tensor that is no attribute."""
        if issubclass(type(a), fx.Proxy):  # whatever it says that it is
            return a.node
        if self._computed is not None and a in self._computed:
            raise computed_from_state()
        return super().create_arg(a)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Do what torch.fx does, and keep a reference to the cache, which a rollback has to clean."""
        if threading.get_ident() != self._thread:
            return attr_val
        self._parameter_proxies = parameter_proxy_cache
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Enter ``m``, or make it an opaque leaf if that fails."""
        if threading.get_ident() != self._thread:  # torch.fx patches modules for all threads
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            output = super().call_module(m, forward, args, kwargs)
            keys = _keys_of_output(m) if id(m) in self.leaves else None
            if keys is None:
                return output
            items = {key: operator.getitem(output, key) for key in keys}  # code may iterate over them
            self._items += [item.node for item in items.values()]
            return items
        # fx creates the nodes of attribute proxies lazily; if it did so inside `m`, a rollback would remove them.
        for value in _leaves((args, kwargs)):
            _ = value.node if isinstance(value, fx.Proxy) else None
        last = next(iter(reversed(self.graph.nodes)), None)
        module_stack = self.module_stack.copy()
        reads = {} if self._reads is None else dict(self._reads.values)
        raised, self.raised = self.raised, None
        try:
            output = super().call_module(m, forward, args, kwargs)
            self.check_reads()
            self.entered.append(path)
            self.raised = raised
            return output
        except Exception as error:  # whatever the user's code raises on proxies: kept as the reason
            self.raised = raised
            self._erase_after(last)
            if self._reads is not None:
                self._reads.values = reads
            self.module_stack = module_stack
            self.rollbacks.append(rollback_of(path, error))
            return self.create_proxy("call_module", path, args, kwargs)

    def erase_unused_items(self) -> None:
        for node in self._items:
            if not node.users and not node._erased:
                self.graph.erase_node(node)

    def check_reads(self) -> None:
        """Refuse to make a constant of an attribute that the traced code changes, to forget that it has put something
        else into the place of a buffer, and a graph of code that has handled an error of a proxy.
        """
        if self.raised is not None:
            raise self.raised
        changed = None if self._reads is None else self._reads.changed()
        if changed is not None:
            raise LostByTracing(f"attribute {changed}, which the code changes, would be a constant of the graph")
        for path, buffers, name, buffer in self._buffers:
            if (assigned := buffers.get(name)) is not buffer:
                buffers[name] = buffer
                if not isinstance(assigned, fx.Proxy) or _changed_in_place(assigned.node) != path:
                    raise LostByTracing(f"buffer {path}, which the code assigns, would stay as it is")

    def watch_buffers(self, root: nn.Module) -> None:
        """Let ``check_reads`` know what the buffers are before the trace."""
        self._buffers = [
            (f"{path}.{name}" if path else name, module._buffers, name, buffer)
            for path, module in root.named_modules()
            for name, buffer in module._buffers.items()
        ]

    def _erase_after(self, last: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
            for name, proxy in list(self._parameter_proxies.items()):
                if proxy.node is node:
                    del self._parameter_proxies[name]


def _changed_in_place(node: fx.Node) -> str:
    """The path of the buffer that a node, such as that of ``self.steps += 1``, changes; "" if it makes a value."""
    while node.op == "call_function" and getattr(node.target, "__name__", "") in fx.graph.inplace_methods:
        node = node.args[0]  # type: ignore[assignment]
    return str(node.target) if node.op == "get_attr" else ""


def _reads_values(node: fx.Node) -> bool:
    """Whether a node is computed from a number in a tensor."""
    computed = [node]
    for one in computed:  # which grows
        computed += [source for source in one.all_input_nodes if source not in computed]
    return any(one.op == "call_method" and one.target in ("item", "tolist") for one in computed)


def rollback_of(path: str, error: Exception) -> Diagnostic:
    """What to report about an exception that was raised while tracing."""
    reason = "lost_by_tracing" if isinstance(error, LostByTracing) else "untraceable"
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    where = _raised_at(error)
    at = f" (at {where})" if where else ""
    return Diagnostic(reason, path, f"{type(error).__name__}: {lines[0] if lines else ''}{at}")


def _raised_at(error: Exception) -> SourceLocation | None:
    """The last line of the user's code that an exception came through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*NOT_THE_USERS, "<")) and frame.lineno is not None:
            return SourceLocation(frame.filename, frame.lineno)
    return None


def expect_constant(value: object, constant: object, name: str) -> None:
    """Refuse another value for an argument that is a constant of the graph, such as None; without a name, for a number
    or keys that the code of the model needs, as :func:`fixed_value` makes them.
    """
    if isinstance(value, fx.Proxy):  # also where a pickled graph is traced again
        value.tracer.create_proxy("call_function", expect_constant, (value, constant, name), {})
        return
    given = value if name else fixed_value(value)
    if isinstance(given, torch.Tensor) or given != constant:
        raise InputError(
            f"{name or 'what the code needs of the batch'} is {short(given)}, but the graph was made for "
            f"{short(constant)}.",
            reason="wrong_argument",
            what_to_do="make the graph with a sample like this call, or convert without whole_graph=True.",
        )


def fixed_value(value: Any) -> int | list[str] | None:
    """What a graph may have instead of a value: a number, strings, or how many items there are; otherwise None."""
    if isinstance(value, int):
        return int(value)
    if not isinstance(value, Sized):
        return None
    items: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, torch.Tensor) else [None]
    return items if all(isinstance(item, str) for item in items) else len(value)


def items_of(value: Any) -> Any:
    """The items, or the keys, as a list."""
    if isinstance(value, fx.Proxy):
        return value.tracer.create_proxy("call_function", items_of, (value,), {})
    return list(value)
