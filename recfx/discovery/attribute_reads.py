"""Which plain Python attributes of modules code reads while it is traced: a graph has their values for ever."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
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

_MISSING = object()


class AttributeReads:
    """The numbers, strings, and containers of these that the code of ``root`` and its modules reads.

    Attributes:
        values: what was read first, by path of the module and name.
    """

    def __init__(self, root: nn.Module) -> None:
        self.values: dict[tuple[str, str], Any] = {}
        self._modules = {id(module): (path, module) for path, module in root.named_modules()}
        self._by_path = dict(self._modules.values())

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """A context in which this thread's reads are recorded."""
        thread = threading.get_ident()

        def read(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if name not in _OF_TORCH and id(module) in self._modules and threading.get_ident() == thread:
                key = (self._modules[id(module)][0], name)
                plain = plain_attribute(module, name)
                if plain is not _MISSING and key not in self.values:
                    self.values[key] = copy.deepcopy(plain)
            return value

        with mock.patch.object(nn.Module, "__getattribute__", read, create=True):
            yield

    def changed(self) -> str | None:
        """The first attribute that has another value than when it was read; None if there is none."""
        for (path, name), value in self.values.items():
            if plain_attribute(self._by_path[path], name) != value:
                return f"{path}.{name}" if path else name
        return None


def plain_attribute(module: nn.Module, name: str) -> Any:
    """An attribute of a module or its class; ``_MISSING`` if it is not plain, such as a tensor or a property."""
    value = object.__getattribute__(module, "__dict__").get(name, _MISSING)
    value = getattr(type(module), name, _MISSING) if value is _MISSING else value
    return value if _is_plain(value) else _MISSING


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, list, tuple, set) or (type(value).__name__ == "OrderedDict" and not value):
        return all(map(_is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)
