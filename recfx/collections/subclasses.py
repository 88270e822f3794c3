"""Classes that stand for a user's subclasses of the standard collections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

Replacement = TypeVar("Replacement")

_classes: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def class_for(replacement: type[Any], standard: type[nn.Module]) -> type[Any]:
    """``replacement`` itself for the standard collection; for a subclass of it, a class that has its methods too.

    Public methods that the subclass overrides win over those of ``replacement``. ``forward`` is never one of them,
    because a subclass with its own forward is not converted.
    """
    of_torchrec = replacement._kind.standard
    if standard is of_torchrec:
        return replacement
    if (replacement, standard) in _classes:  # one class per pair, or copies would be of a different class
        return _classes[replacement, standard]
    overrides: dict[str, Any] = {"_standard": standard, "_replacement": replacement}
    for base in reversed(standard.__mro__[: standard.__mro__.index(of_torchrec)]):
        for name, value in base.__dict__.items():
            if hasattr(replacement, name) and not name.startswith("_"):
                overrides[name] = value
    _classes[replacement, standard] = type(standard.__name__, (replacement, standard), overrides)
    return _classes[replacement, standard]


def names_taken(replacement: type[Any], standard: type[nn.Module], instance_names: Iterable[str]) -> list[str]:
    """What a subclass of the standard collection defines although ``replacement`` uses the name for its own."""
    of_torchrec, own = replacement._kind.standard, set(instance_names)
    bases = standard.__mro__[: standard.__mro__.index(of_torchrec)]
    defined = {
        name for base in bases for name in vars(base) if not (name.startswith("__") or hasattr(of_torchrec, name))
    }
    return sorted(name for name in defined if name in own or hasattr(replacement, name))


def classes_made_for(replacement: type[Any]) -> list[type[Any]]:
    """The classes that stand for subclasses of the standard collection, made so far in this process."""
    return [subclass for (kind, _), subclass in _classes.items() if kind is replacement]


def new_instance(replacement: type[Replacement], standard: type[nn.Module]) -> Replacement:
    """An instance without state, from which pickles and copies start: the class cannot be found by its name."""
    kind: type[Replacement] = class_for(replacement, standard)
    return kind.__new__(kind)
