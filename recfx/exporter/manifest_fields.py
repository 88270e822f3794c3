"""The table of what each field of a manifest may be: a file may come from anywhere, and say anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from recfx.exporter.arguments import Pattern, is_plain
from recfx.exporter.returns import tensor_names
from recfx.exporter.serving.targets import FOR_DEVICES, NATIVE, SCRIPT, TRACED

_LEAVES = ("tensor", "kjt", "jagged", "keyed_tensor")
_KINDS = (*_LEAVES, "constant", "dict", "list", "tuple", "dataclass")
PLAIN = ("kind", "name", "value", "is_weighted", "type_name")
"""The fields of a pattern that a manifest has as they are."""

_TARGETS = tuple(target.name for target in (SCRIPT, TRACED, NATIVE, *FOR_DEVICES))


class Field(NamedTuple):
    """What a field of a manifest may be.

    Args:
        wanted: in words, for messages.
        fits: whether a value does, given the whole manifest; it may raise what ``misfit`` catches.
        is_needed: whether files of every version have it.
    """

    wanted: str
    fits: Callable[[Any, dict[str, Any]], bool]
    is_needed: bool = False


def misfit(manifest: dict[str, Any]) -> tuple[str, str] | None:
    """The first field that is missing or something else, and what it has to be; None if all are right."""
    for name, field in FIELDS.items():
        try:
            is_right = field.fits(manifest[name], manifest) if name in manifest else not field.is_needed
        except (KeyError, TypeError, ValueError, RecursionError):
            is_right = False
        if not is_right:
            return name, field.wanted
    return None


def pattern_from(described: dict[str, Any]) -> Pattern:
    """The pattern that a manifest describes.

    Raises:
        KeyError, TypeError, ValueError: it describes none.
    """
    items = tuple(pattern_from(item) for item in described["items"])
    pattern = Pattern(keys=tuple(described["keys"]), items=items, **{field: described[field] for field in PLAIN})
    kind, value = pattern.kind, pattern.value
    is_leaf, has_keys = kind in _LEAVES, kind in ("dict", "dataclass") or bool(items and pattern.keys)
    if not (
        kind in _KINDS
        and _are_names(described["keys"])
        and _are_names([pattern.name, pattern.type_name])
        and isinstance(pattern.is_weighted, bool)
        and bool(pattern.name) == is_leaf
        and not (items and (is_leaf or kind == "constant"))
        and (len(pattern.keys) == len(items) or not has_keys)
        and _VALUES.get(kind, lambda _: value is None)(value)
        and (kind != "keyed_tensor" or len(value) == len(pattern.keys))
    ):
        raise ValueError(kind)
    return pattern


def _is_integer(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_size(value: Any) -> bool:
    return _is_integer(value, -1)


def _are_integers(values: Any) -> bool:
    return isinstance(values, list) and all(_is_integer(value, 0) for value in values)


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _describes_tensor(value: Any) -> bool:
    """Older files say nothing of a tensor."""
    is_dict = isinstance(value, dict) and value.keys() == {"dimensions", "floats"}
    return value is None or (is_dict and _is_integer(value["dimensions"], 0) and isinstance(value["floats"], bool))


_VALUES: dict[str, Callable[[Any], bool]] = {
    "constant": is_plain,
    "tensor": _describes_tensor,
    "keyed_tensor": _are_integers,
}


def _matches(expression: str, value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(expression, value, re.ASCII) is not None


def _one_of(*names: str) -> Field:
    return Field(f"one of {', '.join(names)}", lambda value, _: isinstance(value, str) and value in names)


def _dict_of(contents: str, fits: Callable[[Any], bool], is_needed: bool = False) -> Field:
    return Field(
        f"a dict of {contents}", lambda value, _: isinstance(value, dict) and all(map(fits, value.values())), is_needed
    )


def _are_dicts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)


def _are_patterns(described: Iterable[dict[str, Any]]) -> bool:
    return isinstance(described, list) and all(pattern_from(pattern) is not None for pattern in described)


_VERSION = Field("a version", lambda value, _: _matches(r"[\w.+!-]{1,60}", value))

FIELDS = {
    "recfx_version": _VERSION,
    "torch_version": _VERSION,
    "content_crc32": Field("8 hexadecimal digits", lambda value, _: _matches("[0-9a-f]{8}", value)),
    "portable": Field("true or false", lambda value, _: isinstance(value, bool)),
    "operators_version": Field(
        "the version of the operators of a file that is not portable",
        lambda value, manifest: _is_integer(value, 0) or (value is None and manifest.get("portable", True)),
    ),
    "format": _one_of("torchscript", "pt2"),
    "target": _one_of(*_TARGETS),
    "arguments": Field("a list of patterns", lambda value, _: _are_patterns(value), True),
    "parameters": Field(
        "a name for each argument",
        lambda value, manifest: _are_names(value) and len(value) == len(manifest["arguments"]),
        True,
    ),
    "positional": Field(
        "how many arguments are passed by position",
        lambda value, manifest: _is_integer(value, 0) and value <= len(manifest["parameters"]),
        True,
    ),
    "order": Field("a list of names", lambda value, _: _are_names(value)),
    "defaults": _dict_of("constants", is_plain),
    "sizes": _dict_of("lists of sizes", lambda sizes: isinstance(sizes, list) and all(map(_is_size, sizes))),
    "exact": Field("a list of names", lambda value, _: _are_names(value)),
    "returns": Field("a pattern", lambda value, _: pattern_from(value) is not None, True),
    "outputs": Field(
        "a list of the names of what is returned",
        lambda value, manifest: value == tensor_names(pattern_from(manifest["returns"])),
        True,
    ),
    "crc32": _dict_of("checksums", lambda value: _matches("[0-9a-f]{8}", value)),
    "collections": _dict_of("lists of tables", _are_dicts, True),
}
"""By name, in the order in which they are checked: each may rely on those before it."""
