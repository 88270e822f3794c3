"""recfx's operators by their references in torch, as on a machine without the C++ library."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from recfx.kernels.build import library


class _Operators:
    """Operators that have no reference are those of the library."""

    def __getattr__(self, name: str) -> Any:
        return library.REFERENCES.get(name) or getattr(torch.ops.recfx, name)


@contextmanager
def references() -> Iterator[None]:
    """In this block, there seems to be no library."""
    with (
        mock.patch.object(library, "load", return_value=False),
        mock.patch.object(library, "operators", return_value=_Operators()),
    ):
        yield


class ByReferences:
    """The functions of a module of operators, each of which runs in such a block."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name)

        def run(*arguments: Any, **named: Any) -> Any:
            with references():
                return function(*arguments, **named)

        return run
