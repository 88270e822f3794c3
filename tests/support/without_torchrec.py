"""Lets the kernels and the rules of optimizers be imported where there is torch and Triton, and no more.

A machine that is lent for its GPU may have neither TorchRec nor FBGEMM for its torch. Kernels need neither, but
``recfx/__init__.py`` and the names in the rules do. Where they are missing, the former is passed over, and the latter
get names that stand for nothing.
"""

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_MISSING = ("torchrec", "fbgemm_gpu")
_ROOT = Path(__file__).resolve().parents[2]


class _Name(type):
    """A class with any attribute: its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Names(MetaPathFinder, Loader):
    """Finds modules below the missing packages; whatever they are asked for is a class of that name."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _MISSING else None

    def exec_module(self, module: ModuleType) -> None:
        def make(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Name(name, (), {})

        module.__getattr__ = make  # type: ignore[method-assign]


@cache
def prepare() -> bool:
    """Whether something is missing; if so, kernels and rules can be imported from now on, and nothing else."""
    if all(importlib.util.find_spec(name) is not None for name in _MISSING):
        return False
    if "recfx" not in sys.modules:
        bare = ModuleType("recfx")
        bare.__path__ = [str(_ROOT / "recfx")]
        sys.modules["recfx"] = bare
        for name in _MISSING:
            sys.modules.pop(name, None)
        sys.meta_path.insert(0, _Names())
    return True
