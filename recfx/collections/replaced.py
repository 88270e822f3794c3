"""Catches what still calls a collection after another one has taken its place.

A closure, a global, a hook, a weak reference or a cache may hold the original, where a conversion does not look.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from recfx.errors import ConversionError

REPLACED = "replaced_collection_called"
_CALL_NO_OTHERS = {"torch", "torchrec", "fbgemm_gpu", "recfx"}  # packages of modules without code of the user's
_REFUSED: ContextVar[frozenset[int]] = ContextVar("_REFUSED", default=frozenset())  # by id


def refuse_calls(original: nn.Module, path: str) -> None:
    """Let every call of ``original`` raise ``replaced_collection_called``; copies and pickles of it do so, too."""
    original.__dict__["forward"] = partial(_refuse, path)


def is_replaced(module: nn.Module) -> bool:
    """Whether every call of the module is refused, because another one has taken its place."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _refuse


@contextlib.contextmanager
def calls_refused(originals: Mapping[str, nn.Module]) -> Iterator[None]:
    """A context in which this thread may not call any of ``originals``, by path; outside, they are as before."""
    entered = _enter([_Caught(original, path) for path, original in originals.items()])
    try:
        yield
    finally:
        _leave(*entered)


def catch_calls(copy: nn.Module, originals: Mapping[str, nn.Module]) -> None:
    """Refuse calls of ``originals``, by path, while ``copy`` runs, a model in which others have taken their places, or
    one of its modules of the user's classes. Pickles, and what ``copy.deepcopy`` makes, do not catch them.
    """
    caught = [_Caught(original, path) for path, original in originals.items()]
    for module in copy.modules():
        if module is copy or type(module).__module__.split(".")[0] not in _CALL_NO_OTHERS:
            # Not a hook, which TorchScript would compile.
            call = module.__dict__.get("_compiled_call_impl")
            before = call.caught if isinstance(call, CatchingCall) else []
            module.__dict__["_compiled_call_impl"] = CatchingCall(module, before + caught)


class CatchingCall:
    """What calls a module of a converted model."""

    def __init__(self, module: nn.Module, caught: list[_Caught]) -> None:
        self._module, self.caught = weakref.ref(module), caught
        self._ids = frozenset(forward.id for forward in caught)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if torch.compiler.is_compiling():
            return module._call_impl(*args, **kwargs)
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, nn.Module) and caller.__dict__.get("_compiled_call_impl") is self:
            module = caller  # such as a replica, which has been given the attributes of the module
        if self._ids <= _REFUSED.get():
            return module._call_impl(*args, **kwargs)
        entered = _enter(self.caught)
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            _leave(*entered)

    def __reduce__(self) -> Any:
        return type(None), ()


class _Caught:
    """The ``forward`` of an original while a copy of its model runs; other threads call it as before."""

    def __init__(self, original: nn.Module, path: str) -> None:
        self.original, self.id, self.path = weakref.ref(original), id(original), path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.id in _REFUSED.get():
            _refuse(self.path)
        original: Any = self.original()
        return type(original).forward(original, *args, **kwargs)


def _enter(caught: list[_Caught]) -> tuple[list[nn.Module], Token[frozenset[int]]]:
    alive = [(forward, original) for forward in caught if (original := forward.original()) is not None]
    for forward, original in alive:
        original.__dict__.setdefault("forward", forward)
    return [original for _, original in alive], _REFUSED.set(_REFUSED.get() | {forward.id for forward, _ in alive})


def _leave(originals: list[nn.Module], before: Token[frozenset[int]]) -> None:
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
