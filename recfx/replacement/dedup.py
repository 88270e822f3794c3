"""The ``dedup`` of ``recfx.convert``: which tables send each different id once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from recfx.errors import ConversionError
from recfx.ir.dedup import Dedup

Asked = bool | Literal["auto"] | Mapping[str, bool | float]


def check_asked(asked: Any) -> None:
    """Refuse what is neither a setting nor a dict from table names to settings: ``invalid_argument``."""
    if isinstance(asked, Mapping):
        wrong = [(table, value) for table, value in asked.items() if not (isinstance(table, str) and _is_one(value))]
        what = f"dedup has {wrong[0][0]!r}: {wrong[0][1]!r}." if wrong else ""
    else:
        what = "" if isinstance(asked, bool) or asked == "auto" else f"dedup is {asked!r}."
    if what:
        raise ConversionError(
            what,
            reason="invalid_argument",
            what_to_do="pass 'auto', True or False; or a dict from table names to True, False, or the expected share "
            "of different ids, above 0 and at most 1.",
        )


def _is_one(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, (int, float)) and 0 < value <= 1)


def dedup_of(table: str, asked: Asked) -> Dedup:
    """What is asked of one table."""
    value = asked.get(table, "auto") if isinstance(asked, Mapping) else asked
    if isinstance(value, bool):
        return Dedup(asked=value)
    return Dedup() if isinstance(value, str) else Dedup(share=float(value))
