"""Arguments of public functions that are of another parameter's type: the error says which one was probably meant."""

from __future__ import annotations

import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, wraps
from typing import Any, Literal, TypeVar

from recfx.errors import RecfxError, type_of

_F = TypeVar("_F", bound=Callable[..., Any])

_NUMBERS = (bool, int, float)
_OF_BATCHES = ("Tensor", "JaggedTensor", "KeyedJaggedTensor", "Sample")  # names of classes

_A_MODULE = "pass the torch.nn.Module that holds the collections."
_AN_ENVIRONMENT = "pass torchrec.distributed.types.ShardingEnv.from_process_group(group)."
_HOW = {
    "model": _A_MODULE,
    "model_or_graph": _A_MODULE,
    "original": _A_MODULE,
    "converted": _A_MODULE,
    "sample": "pass one call of the model: a tuple of its positional arguments, or a recfx.Sample.",
    "hashing": "pass a recfx.HashConfig, None, or a dict from table names to either of them.",
    "plan": "pass a torchrec.distributed.types.ShardingPlan, from recfx.plan or TorchRec's planner.",
    "env": _AN_ENVIRONMENT,
    "host_env": _AN_ENVIRONMENT,
    "topology": "pass a torchrec.distributed.planner.Topology or recfx.planner.topology.npu_topology(...).",
    "device": "pass a torch.device or its name, such as 'cpu'.",
    "id_ranges": "pass a dict from features to their lowest and highest id: {'user': (0, 999)}.",
    "passes": "pass [*recfx.passes(), mine], where mine has a name and a method call(graph) that returns a "
    "recfx.passes.PassResult; for a function: recfx.passes.Rewrite(name, function).",
}
"""What to pass, by the name of the parameter. For others, it is what their annotation says."""


def typed(error: type[RecfxError], *, left: Collection[str] = ()) -> Callable[[_F], _F]:
    """Let a function refuse what its annotations do not take, and name the parameter that takes it.

    Numbers, file names and literals are left to the function, unless another parameter was probably meant.

    Args:
        error: the class of what is raised, with reason code ``invalid_argument``.
        left: parameters that are left to the function as well.
    """

    def decorate(function: _F) -> _F:
        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                given = inspect.signature(function).bind(*args, **kwargs).arguments
            except TypeError:
                return function(*args, **kwargs)  # Python says which argument is missing or unknown
            if problem := _problem(given, _hints(function), function.__annotations__, left):
                message, what_to_do = problem
                raise error(message, reason="invalid_argument", what_to_do=what_to_do)
            return function(*args, **kwargs)

        return typing.cast(_F, checked)

    return decorate


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of the parameters, in order."""
    hints = typing.get_type_hints(function)
    return {name: hints[name] for name in inspect.signature(function).parameters if name in hints}


def _problem(
    given: Mapping[str, Any], hints: Mapping[str, Any], annotations: Mapping[str, str], left: Collection[str]
) -> tuple[str, str] | None:
    """What is wrong with the first argument that its parameter does not take, and what to do."""
    wrong = [name for name, value in given.items() if name in hints and not _fits(name, value, hints)]
    for name in wrong:
        value = given[name]
        meant = [f"{other}=" for other in _meant(name, given, hints, wrong)]
        if meant:
            return f"{name} is {type_of(value)}, which {' or '.join(meant)} takes.", "pass it by that name."
        kinds = list(_kinds(hints[name]))
        if name in left or (name not in _HOW and {int, float, os.PathLike, Literal}.intersection(kinds)):
            continue
        of_class = isinstance(value, type) and any(isinstance(kind, type) and issubclass(value, kind) for kind in kinds)
        how = _HOW.get(name, f"pass {name}= of type {annotations[name]}.")
        return f"{name} is {type_of(value)}.", f"pass an object of it, {value.__name__}(...)." if of_class else how
    return None


def _meant(name: str, given: Mapping[str, Any], hints: Mapping[str, Any], wrong: Collection[str]) -> list[str]:
    """The other parameters that take the value of ``name``, of those without a value that fits."""
    if (value := given[name]) is None:
        return []
    free = {other: hint for other, hint in hints.items() if other != name and (other not in given or other in wrong)}
    is_batch = isinstance(value, (Mapping, list, tuple)) or type(value).__name__ in _OF_BATCHES
    of_class = [
        other
        for other, hint in free.items()
        if hint is not Any
        and ((_is_own(value, hint) and not isinstance(value, str)) or (other in wrong and _takes(value, hint)))
    ]
    return of_class or ["sample"] * (is_batch and "sample" in free)


def _fits(name: str, value: Any, hints: Mapping[str, Any]) -> bool:
    """Whether a parameter takes the value; one of any type takes what is of no other parameter's class."""
    if hints[name] is not Any:
        return _takes(value, hints[name])
    return not any(_is_own(value, hint, concrete=True) for other, hint in hints.items() if other != name)


def _is_own(value: Any, hint: Any, *, concrete: bool = False) -> bool:
    """Whether the value says by its class, which may have to be concrete, that it is for such a parameter."""
    kinds = set(_kinds(hint)).difference((Any, str, Literal, Iterable, type(None)), _NUMBERS)
    if isinstance(value, (str, int, float)):
        return isinstance(value, str) and os.PathLike in kinds
    return any(_is_of(value, kind) for kind in kinds if not (concrete and kind.__module__ == "collections.abc"))


def _takes(value: Any, hint: Any) -> bool:
    return any(kind is Any or _is_of(value, kind) for kind in _kinds(hint))


def _is_of(value: Any, kind: Any) -> bool:
    if kind is Literal:
        return isinstance(value, str)
    if kind in _NUMBERS or (kind.__name__ == "device" and isinstance(value, int)):  # as in torch.device(0)
        return isinstance(value, numbers.Real) or type(value).__module__ == "numpy"
    if kind is Iterable and isinstance(value, (str, type)):
        return False
    return isinstance(value, kind)


def _kinds(hint: Any) -> Iterator[Any]:
    """The classes that a type names, without their arguments; a list stands for whatever can be iterated."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _kinds(member)
    else:
        kind = hint if origin is None else origin
        yield Iterable if kind is list else kind
