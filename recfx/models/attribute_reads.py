"""Which plain Python attributes of modules code reads while it is traced: a graph has their values for ever."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch import nn

_OF_TORCH = frozenset(
    {
        "training",
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_compiled_call_impl",
        "call_super_init",
    }
)
"""What a graph does not keep: modes are checked by themselves, and what is registered is read when the graph runs."""

MISSING = object()


class AttributeReads:
    """What the code of some modules, which are given by path, reads of their attributes. ``value_of`` is the value of
    an attribute as it is now, by module and name; ``MISSING`` if it does not matter.
    """

    def __init__(self, modules: Mapping[str, nn.Module], value_of: Callable[[nn.Module, str], Any]) -> None:
        self.values: dict[tuple[str, str], Any] = {}  # what was read first, by path of the module and name
        self._value_of = value_of
        self._modules = {id(module): (path, module) for path, module in modules.items()}
        self._by_path = modules

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """A context in which this thread's reads are recorded."""
        thread = threading.get_ident()

        def read(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if name not in _OF_TORCH and id(module) in self._modules and threading.get_ident() == thread:
                key = (self._modules[id(module)][0], name)
                if key not in self.values and (now := self._value_of(module, name)) is not MISSING:
                    self.values[key] = copy.deepcopy(now)
            return value

        with mock.patch.object(nn.Module, "__getattribute__", read, create=True):
            yield

    def changed(self) -> str | None:
        """The first attribute that has another value than when it was read; None if there is none."""
        for (path, name), value in self.values.items():
            if self._value_of(self._by_path[path], name) != value:
                return f"{path}.{name}" if path else name
        return None


def plain_attribute(module: nn.Module, name: str) -> Any:
    """An attribute of a module or its class; ``MISSING`` if it is not plain, such as a tensor or a property."""
    value = object.__getattribute__(module, "__dict__").get(name, MISSING)
    value = getattr(type(module), name, MISSING) if value is MISSING else value
    return value if _is_plain(value) else MISSING


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, list, tuple, set) or (type(value).__name__ == "OrderedDict" and not value):
        return all(map(_is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)
