"""What calls of a model change. Buffers may change, and do so in the file as well. Nothing else may: a file does not
keep it, and copies of the model share it with the user's.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recfx.collections.converted_collection import ConvertedCollection, converted_collections
from recfx.collections.copy_modules import attributes
from recfx.errors import ExportError
from recfx.models.attribute_reads import MISSING, AttributeReads
from recfx.runtime.base import holds_hooks

_PLAIN = (bool, int, float, complex, str, bytes, frozenset)
_LIBRARIES = {"fbgemm_gpu", "recfx", "tensordict", "torch", "torchrec"}
_NOT_THE_USERS = {"numpy", *_LIBRARIES, *sys.stdlib_module_names}


def not_in_collections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model, by path, without its converted collections and what is in them."""
    inside = {
        id(part) for module in model.modules() if isinstance(module, ConvertedCollection) for part in module.modules()
    }
    return ((path, module) for path, module in model.named_modules() if id(module) not in inside)


def storage_of(tensor: torch.Tensor) -> int | None:
    """What is equal for tensors that share their memory; None if the tensor has none of its own."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    return tensor.untyped_storage()._cdata


def tensors_of_modules(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters, buffers, and tensors in attributes of the modules that are in no collection, with their paths."""
    for path, module in not_in_collections(model):
        prefix = f"{path}." if path else ""
        for name, value in [*module._parameters.items(), *module._buffers.items(), *attributes(module)]:
            for leaf in _leaves(value, {}):
                if isinstance(leaf, torch.Tensor):
                    yield f"{prefix}{name}", leaf


class Unchanged(TorchDispatchMode):
    """A context in which nothing may write into the tensors of a model, which its copies share (``changes_state``)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._paths = {storage_of(tensor): path for path, tensor in tensors_of_modules(model)}
        self._paths.pop(None, None)
        self._changed = ""

    def __exit__(self, kind: Any, error: Any, where: Any) -> None:
        super().__exit__(kind, error, where)
        if self._changed and not isinstance(error, ExportError):  # TorchScript makes another error of it
            raise changes_state(self._changed) from error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for number, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[number] if number < len(args) else kwargs.get(argument.name)
                    for tensor in tree_leaves(given):
                        if isinstance(tensor, torch.Tensor) and (path := self._paths.get(storage_of(tensor))):
                            self._changed = path
                            raise changes_state(path)
        return func(*args, **kwargs)


def changes_state(path: str, what: str = "") -> ExportError:
    """The error of a model that changes what its file would not keep."""
    return ExportError(
        f"a call of the model in eval mode changes {what or repr(path)}, which a file would not keep.",
        reason="changes_state",
        module_path=path.rpartition(".")[0],
        what_to_do="register it as a buffer of its own, which files keep, or leave it alone in eval mode. Random "
        "numbers that are tensors of torch's are drawn by files as well.",
    )


@contextlib.contextmanager
def refusing_changed_attributes(copy: nn.Module) -> Iterator[None]:
    """A context for one call of a copy, which may not change an attribute that it has read before: the next call would
    depend on it. What a call only leaves behind is no state.
    """
    collections = converted_collections(copy)
    own = {id(module): {"__dict__", *module.own_names()} for module in collections.values()}
    modules = dict(not_in_collections(copy)) | collections

    def content(module: nn.Module, name: str) -> Any:
        # Hooks watch, as a rule; one that changes an answer from call to call is seen in the answers.
        if holds_hooks(name) or name in own.get(id(module), ()):
            return MISSING
        held = object.__getattribute__(module, "__dict__")  # without the read that is being recorded
        if name != "__dict__":
            return _Content(held.get(name), used.ids)
        reader = str(sys._getframe(2).f_globals.get("__name__"))  # torch itself takes what is registered
        user = {key: value for key, value in held.items() if key not in _OF_TORCH}
        return MISSING if reader.startswith("torch.") else _Content(user, used.ids)

    used = _Used()
    reads = AttributeReads(modules, content)
    classes = {type(module): _Content(type(module), used.ids) for module in modules.values()}
    with reads.recorded(), used:
        yield
    if (path := reads.changed()) is not None:
        raise changes_state(path)
    for kind, before in classes.items():
        if _Content(kind, used.ids) != before:
            raise changes_state("", f"an attribute of class {kind.__name__}, or a global that its methods name")


_OF_TORCH = frozenset(nn.Module().__dict__)


class _Used(TorchDispatchMode):
    """A context that collects the ids of the tensors that are passed to operators."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids |= {id(value) for value in tree_leaves((args, kwargs or {})) if isinstance(value, torch.Tensor)}
        return func(*args, **kwargs or {})


class _Content:
    """What an attribute holds when this is made: equal to what it held before if nothing in it was replaced or written,
    but for tensors that the calls between have not used (their ids are not in ``used``): these were only left there.
    """

    def __init__(self, value: Any, used: set[int]) -> None:
        self._seen: dict[int, Any] = {}  # an id is an object's own only as long as that lives
        self._used = used
        self._leaves = [(leaf, _version(leaf)) for leaf in _leaves(value, self._seen)]

    def __deepcopy__(self, memo: Any) -> _Content:
        return self

    def __eq__(self, before: Any) -> bool:
        used = self._used & {id(leaf) for leaf, _ in before._leaves}
        new, old = (
            [pair for pair in content._leaves if not isinstance(pair[0], torch.Tensor) or id(pair[0]) in used]
            for content in (self, before)
        )
        return len(new) == len(old) and all(starmap(_is_same, zip(new, old, strict=True)))

    __hash__ = None  # type: ignore[assignment]


def is_users(value: type | FunctionType) -> bool:
    """Whether a class or a function is of the user's code, rather than of a library that is known here."""
    return str(value.__module__).partition(".")[0] not in _NOT_THE_USERS


def _version(leaf: Any) -> int | None:
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None


def _is_same(one: tuple[Any, int | None], two: tuple[Any, int | None]) -> bool:
    (old, old_version), (new, new_version) = one, two
    if type(old) is type(new) and isinstance(old, _PLAIN):
        return bool(old == new or (old != old and new != new))
    return old is new and old_version == new_version


def _leaves(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """What an attribute holds, inside containers, functions and objects of every kind, as it is now."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value is None or isinstance(value, _PLAIN):
            yield value
        elif id(value) not in seen and not isinstance(value, (nn.Module, ModuleType)):
            seen[id(value)] = value
            leaves, parts = _taken_apart(value)
            yield from leaves
            waiting += parts


def _taken_apart(value: Any) -> tuple[Sequence[Any], Iterable[Any]]:
    """What is compared of an object itself, and what else to look at."""
    if isinstance(value, torch.Tensor):
        return (value,), ()
    if isinstance(value, dict):
        return (), (*value, *value.values(), getattr(value, "__dict__", None))
    if isinstance(value, (list, tuple)):
        return (), (*value, getattr(value, "__dict__", None))
    if isinstance(value, set):
        return (frozenset(value),), ()
    if isinstance(value, numpy.ndarray):
        return (hash(value.tobytes()),), ()
    if isinstance(value, (FunctionType, type)):
        if not is_users(value):
            return (value,), ()
        return (value,), _of_class(value) if isinstance(value, type) else _of_function(value)
    if isinstance(value, MethodType):
        return (), (value.__self__, value.__func__)
    if isinstance(value, (property, staticmethod, classmethod)):
        return (), (getattr(value, "fget", None), getattr(value, "__func__", None))
    if isinstance(value, GeneratorType):
        return (value, value.gi_frame and value.gi_frame.f_lasti), (value.gi_frame and value.gi_frame.f_locals,)
    if str(type(value).__module__).partition(".")[0] in _LIBRARIES and not isinstance(value, torch.Generator):
        return (value,), ()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = value.__reduce_ex__(4)  # what pickle would save, in a tuple, or a name
            parts = [list(part) if isinstance(part, Iterator) else part for part in saved]
            return (type(value),), (saved,) if isinstance(saved, str) else parts
    except Exception:  # whatever its class raises: a lock cannot be saved, for example
        return (value, repr(value) if type(value).__module__ == "itertools" else None), ()


def _of_function(function: FunctionType) -> Iterator[Any]:
    """What a function refers to: variables around it, its defaults and attributes, and the globals that it names."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # of a variable that was deleted
            yield cell.cell_contents
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    codes = [function.__code__]
    for code in codes:
        names = (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
        yield from (function.__globals__.get(name) for name in names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _of_class(kind: type) -> Iterator[Any]:
    yield from kind.__bases__
    yield from (value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__"))
