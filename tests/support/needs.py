"""What some versions of torch and TorchRec lack: tests of it are skipped there, and say which version they need."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest


@dataclass(frozen=True)
class Missing:
    """Stands for what this version lacks: whoever calls it is skipped, a test or a whole file."""

    name: str
    versions: str

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        pytest.skip(f"needs {self.versions}, which has {self.name}", allow_module_level=True)

    __getitem__ = __call__  # of an enum


def needed(name: str, versions: str) -> Any:
    """What a dotted name stands for, or what is ``Missing``.

    Args:
        name: such as ``torchrec.modules.hash_mc_modules.HashZchManagedCollisionModule``.
        versions: the first that have it, such as ``TorchRec 1.4``.
    """
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except (ModuleNotFoundError, AttributeError):
        return Missing(name, versions)


def needs(is_here: object, versions: str) -> pytest.MarkDecorator:
    """Skips tests of what is not here."""
    return pytest.mark.skipif(not is_here, reason=f"needs {versions}")


_OF_PT2 = "torch 2.9, which reads files of format pt2"
NEEDS_PT2 = needs(importlib.util.find_spec("torch.export.pt2_archive"), _OF_PT2)


@contextmanager
def no_pt2_skips() -> Iterator[None]:
    """Skips the test whose file of format ``pt2`` is refused because torch is too old."""
    try:
        yield
    except Exception as error:
        if "no_pt2" in str(error) and importlib.util.find_spec("torch.export.pt2_archive") is None:
            pytest.skip(f"needs {_OF_PT2}")
        raise
