"""A file of settings in JSON: what is wrong with it is one error, which says where."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from recfx.errors import ConversionError, printable

Kind: TypeAlias = type | tuple[type | None, ...]
_NAMES: dict[type | None, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    None: "null",
}


class JsonFile:
    """A file that was read.

    Args:
        path: the file.
        what_to_do: the advice of all errors.

    Attributes:
        content: what is in the file.

    Raises:
        ConversionError: ``invalid_file``: it cannot be read, or is not JSON, or not all of it is there, or it has a key
            twice.
    """

    def __init__(self, path: str | os.PathLike[str], what_to_do: str) -> None:
        self._path, self._what_to_do = Path(path), what_to_do
        try:
            self.content: Any = json.loads(self._path.read_text(encoding="utf-8"), object_pairs_hook=self._once)
        except OSError as error:
            advice = "pass the path of a file that is there and that you may read."
            raise self._refused(f"it cannot be read: {error.strerror}", advice) from error
        except (ValueError, RecursionError) as error:  # torn, or not text at all
            if isinstance(error, ConversionError):
                raise
            raise self.refused("", f"is not JSON: {error}") from error

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        if twice := next((name for name, count in counts.items() if count > 1), None):
            raise self.refused("", f"has the key {twice!r} twice")
        return dict(pairs)

    def object(self, value: Any, where: str) -> dict[str, Any]:
        """``value``, if it is an object of JSON."""
        return self._of_kind(value, where, dict)

    def integers(self, value: Any, where: str) -> list[int]:
        """``value``, if it is a list of integers."""
        for number, item in enumerate(self._of_kind(value, where, list)):
            self._of_kind(item, f"{where}[{number}]", int)
        return list(value)

    def fields(self, value: Any, where: str, kinds: Mapping[str, Kind]) -> dict[str, Any]:
        """``value``, if it is an object with all of these keys, no others, and values of these kinds."""
        given = self.object(value, where)
        prefix = f"{where}." if where else ""
        for name in given:
            if name not in kinds:
                raise self.refused(where, f"has an unknown key {name!r}; the known keys here are: {', '.join(kinds)}")
        for name, kind in kinds.items():
            if name not in given:
                raise self.refused(where, f"has no {name!r}")
            self._of_kind(given[name], f"{prefix}{name}", kind)
        return given

    def _of_kind(self, value: Any, where: str, kind: Kind) -> Any:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not any(value is None if one is None else type(value) is one for one in kinds):
            given_kind = _NAMES.get(type(value), "a number") if value is not None else "null"
            raise self.refused(where, f"is {given_kind}, not {' or '.join(_NAMES[one] for one in kinds)}")
        return value

    def refused(self, where: str, what: str) -> ConversionError:
        """The error about a place in the file; ``""`` is the whole file."""
        place = printable(where if len(where) <= 200 else f"{where[:200]}...") or "it"
        return self._refused(f"{place} {what}", self._what_to_do)

    def _refused(self, what: str, what_to_do: str) -> ConversionError:
        return ConversionError(f"{self._path}: {what}.", reason="invalid_file", what_to_do=what_to_do)
