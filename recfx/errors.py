"""The errors that users meet.

Each carries a machine-readable reason code, the path of the module (or the name of the table) it is about, and what to
do about it. The reason code also stands in the message, in brackets, so that it can be searched for.
"""

from __future__ import annotations


class RecfxError(Exception):
    """Base of every error that recfx raises on purpose.

    Args:
        message: what is wrong, one sentence.
        reason: reason code, ``snake_case``; the same code stands in reports.
        module_path: fully qualified name of the module concerned, or ``""`` for the root.
        what_to_do: what the user can change to get past it.
    """

    def __init__(self, message: str, *, reason: str, module_path: str = "", what_to_do: str = "") -> None:
        super().__init__(message, reason, module_path, what_to_do)
        self.message = message
        self.reason = reason
        self.module_path = module_path
        self.what_to_do = what_to_do

    def __str__(self) -> str:
        place = f"{self.module_path}: " if self.module_path else ""
        advice = f" What to do: {self.what_to_do}" if self.what_to_do else ""
        return f"[{self.reason}] {place}{self.message}{advice}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.reason, self.module_path, self.what_to_do)


def _rebuild(kind: type[RecfxError], message: str, reason: str, module_path: str, what_to_do: str) -> RecfxError:
    return kind(message, reason=reason, module_path=module_path, what_to_do=what_to_do)


class ConversionError(RecfxError, ValueError):
    """A model, a table or a setting cannot be converted. The model is as it was."""


class TableFullError(RecfxError, RuntimeError):
    """An id needs a row and its bucket has none left. The table is as it was before the batch."""


class OutOfStepError(RecfxError, RuntimeError):
    """Ranks are not at the same place of a step, or one of them failed in the middle of it. Nothing more was sent."""


class CheckpointError(RecfxError, RuntimeError):
    """A saved state is torn, or belongs to something else. The model is as it was."""


class ExportError(RecfxError, RuntimeError):
    """A model cannot be exported, or an exported file cannot be used."""


class InputError(RecfxError, ValueError):
    """A batch does not fit the collection it was given to. Nothing was looked up, inserted or updated."""


class MissingFeatureError(InputError, KeyError):
    """The batch lacks a feature that the collection needs."""


class IdRangeError(InputError, IndexError):
    """An id is outside a table that has no index."""


class IdTypeError(InputError, TypeError):
    """The ids are not integers."""
