"""Catches what still calls a collection after another one has taken its place.

A closure, a global, a hook, a weak reference or a cache may hold the original, where a conversion does not look.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from recfx.errors import ConversionError

REPLACED = "replaced_collection_called"
_REFUSED: ContextVar[tuple[Any, ...]] = ContextVar("_REFUSED", default=())


def refuse_calls(original: nn.Module, path: str) -> None:
    """Let every call of ``original`` raise ``replaced_collection_called``; copies and pickles of it do so, too."""
    original.__dict__["forward"] = partial(_refuse, path)


def is_replaced(module: nn.Module) -> bool:
    """Whether every call of the module is refused, because another one has taken its place."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _refuse


@contextlib.contextmanager
def calls_refused(originals: Mapping[str, nn.Module]) -> Iterator[None]:
    """A context in which this thread may not call any of ``originals``, by path; outside, they are as before.

    Raises:
        ConversionError: ``replaced_collection_called``, where one is called.
    """
    entered = _enter([_Caught(original, path) for path, original in originals.items()])
    try:
        yield
    finally:
        _leave(*entered)


def catch_calls(copy: nn.Module, originals: Mapping[str, nn.Module]) -> None:
    """Refuse calls of ``originals``, by path, whenever ``copy`` runs, a model in which others have taken their places.

    Copies and pickles of ``copy`` do not catch them.
    """
    # Not a hook, which TorchScript would compile.
    copy.__dict__["_compiled_call_impl"] = CatchingCall(copy, originals)


class CatchingCall:
    """What calls a converted model."""

    def __init__(self, model: nn.Module, originals: Mapping[str, nn.Module]) -> None:
        self._model = weakref.ref(model)
        self._caught = [_Caught(original, path) for path, original in originals.items()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        if torch.compiler.is_compiling():
            return model._call_impl(*args, **kwargs)
        entered = _enter(self._caught)
        try:
            return model._call_impl(*args, **kwargs)
        finally:
            _leave(*entered)

    def __reduce__(self) -> Any:
        return type(None), ()


class _Caught:
    """The ``forward`` of an original while a copy of its model runs; other threads call it as before."""

    def __init__(self, original: nn.Module, path: str) -> None:
        self.original, self.path = weakref.ref(original), path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.original in _REFUSED.get():
            _refuse(self.path)
        original: Any = self.original()
        return type(original).forward(original, *args, **kwargs)


def _enter(caught: list[_Caught]) -> tuple[list[nn.Module], Token[tuple[Any, ...]]]:
    alive = [(forward, original) for forward in caught if (original := forward.original()) is not None]
    for forward, original in alive:
        original.__dict__.setdefault("forward", forward)
    refused = (*_REFUSED.get(), *(forward.original for forward, _ in alive))
    return [original for _, original in alive], _REFUSED.set(refused)


def _leave(originals: list[nn.Module], before: Token[tuple[Any, ...]]) -> None:
    _REFUSED.reset(before)
    for original in originals:
        if type(original.__dict__.get("forward")) is _Caught:
            del original.__dict__["forward"]


def _refuse(path: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConversionError(
        "the collection was called that has been replaced by the converted one: a closure, a global, a hook, a weak "
        "reference or a cache still holds it.",
        reason=REPLACED,
        module_path=path,
        what_to_do="let the code that calls it reach the collection through an attribute of the model's modules "
        "(self.ebc), and drop what holds the old one; or leave the collection as it is with on_unsupported='keep'.",
    )
