"""Arguments of public functions that are of another type than their parameter: one error that names it."""

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

_A_MODULE = "pass the torch.nn.Module that holds the collections."
_AN_ENVIRONMENT = "pass torchrec.distributed.types.ShardingEnv.from_process_group(group)."
HOW = {
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
    """Let a function refuse what its annotations do not take; where anything is taken, what another parameter takes.

    Numbers, file names and literals are left to the function.

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
    given: Mapping[str, Any], hints: Mapping[str, Any], annotations: Mapping[str, Any], left: Collection[str]
) -> tuple[str, str] | None:
    """What is wrong with the first argument that its parameter does not take, and what to do."""
    for name, value in given.items():
        kinds = list(_kinds(hints.get(name, Any)))
        if Any in kinds:
            meant = [f"{other}=" for other, hint in hints.items() if other != name and _is_own(value, hint)]
            if meant:
                return f"{name} is {type_of(value)}, which {' or '.join(meant)} takes.", "pass it by that name."
            continue
        is_left = name in left or (name not in HOW and {int, float, os.PathLike, Literal}.intersection(kinds))
        if not is_left and not any(_is_of(value, kind) for kind in kinds):
            return f"{name} is {type_of(value)}.", HOW.get(name, f"pass {name}= of type {_text(annotations[name])}.")
    return None


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _is_own(value: Any, hint: Any) -> bool:
    """Whether the value says by its class, which has to be a concrete one, that it is for such a parameter."""
    kinds = set(_kinds(hint)).difference((Any, str, Literal, type(None)), _NUMBERS)
    if isinstance(value, (str, int, float)):
        return isinstance(value, str) and os.PathLike in kinds
    return any(_is_of(value, kind) for kind in kinds if kind.__module__ != "collections.abc")


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
