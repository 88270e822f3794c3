"""What users are told: a diagnostic, which is recorded, returned or shown, and the errors, which raise one.

It carries a machine-readable reason code, the path of the module (or the name of the table) it is about, and what to
do about it. Its text also contains the reason code, in brackets, so that users can search for it.
"""

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

_Error = TypeVar("_Error", bound="RecfxError")

GROW = (
    "To keep what was learned, save_checkpoint(), build and convert the model again with the new config, attach its "
    "optimizers, and load_checkpoint()."
)
"""The advice for whoever wants another configuration for a table that has been trained."""

_NUMBERED = re.compile(r"(.*?)(?<![0-9])(0|[1-9][0-9]*)", re.DOTALL)


def printable(text: str, keep: str = "") -> str:
    """The text in one line that changes no terminal and fits every encoding of Unicode.

    Line breaks, escape sequences, lone surrogates and marks without a width of their own become backslash escapes.
    The characters in ``keep`` stay as they are, such as line breaks that were not in a name.
    """
    if text.isprintable():  # nearly always
        return text
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in text
    )


def short(value: object) -> str:
    """What came from outside, as Python writes it, in one line of at most 80 characters."""
    return reprlib.repr(value)[:80]


class Severity(str, Enum):
    """How much a diagnostic matters, the worst first. Equal to its string value, which JSON and text show."""

    ERROR = "error"  # something was refused, or is wrong: a report that has one is not ok
    WARNING = "warning"  # it works, but probably not as the user wants it
    INFO = "info"  # worth knowing

    def __str__(self) -> str:
        return str(self.value)

    @property
    def rank(self) -> int:
        """0 for the worst: the order in which diagnostics are shown."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Diagnostic:
    """One thing that the user should know: a refusal, a warning or a note. ``str()`` is one line.

    The same value is raised, recorded when a model is converted, returned by a pass or a kernel target that declines,
    and shown in a report.

    Args:
        code: the reason code, ``snake_case``: for programs, and to search for.
        path: fully qualified name of the module, collection or table that it is about; ``""`` for the whole model.
        message: what happened or what is the case, in one sentence.
        what_to_do: what the user can change; ``""`` if nothing needs to change.
        severity: how much it matters.
        by: the pass or the kernel target that declined; ``""`` if none did.
        node: name of the graph node that it is about, if any.
    """

    code: str
    path: str
    message: str
    what_to_do: str = ""
    severity: Severity = Severity.INFO
    by: str = ""
    node: str = ""

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        advice = f" What to do: {self.what_to_do}" if self.what_to_do else ""
        return f"[{self.code}] {place}{self.message}{advice}"


class RecfxError(Exception):
    """Base of every error that recfx raises on purpose.

    Example:
        >>> try:
        ...     recfx.convert(torch.nn.Linear(2, 2))
        ... except recfx.RecfxError as error:
        ...     print(error.reason, "-", error.what_to_do)
        no_collection - ...

    Args:
        message: what is wrong, in one sentence.
        reason: reason code, ``snake_case``; reports use the same code. torch raises an error of a worker process again
            with nothing but a message, which contains the text of the original error: the code is then the one in
            that text, and ``reraised`` if there is none.
        module_path: fully qualified name of the module concerned, or ``""`` for the root.
        what_to_do: what the user can change to get past it.

    Attributes:
        diagnostic: all of this as one value, as reports show it; ``message``, ``reason``, ``module_path`` and
            ``what_to_do`` are attributes as well.
        by_all_ranks: whether all ranks of a sharded collection raise it at the same call, and can go on together.
    """

    by_all_ranks: bool = False

    def __init__(self, message: str, *, reason: str = "", module_path: str = "", what_to_do: str = "") -> None:
        super().__init__(message, reason, module_path, what_to_do)
        self._take(Diagnostic(reason or self._reason_in(message), module_path, message, what_to_do, Severity.ERROR))

    def _take(self, diagnostic: Diagnostic) -> None:
        self.diagnostic = diagnostic
        self.message, self.reason = diagnostic.message, diagnostic.code
        self.module_path, self.what_to_do = diagnostic.path, diagnostic.what_to_do

    @classmethod
    def of(cls: type[_Error], diagnostic: Diagnostic) -> _Error:
        """The error that raises ``diagnostic``. Its own ``error.diagnostic`` always has the severity of an error.

        Example:
            >>> from recfx.errors import Diagnostic
            >>> recfx.ConversionError.of(Diagnostic("no_collection", "", "there is none."))
            ConversionError(...)
        """
        error = cls(
            diagnostic.message, reason=diagnostic.code, module_path=diagnostic.path, what_to_do=diagnostic.what_to_do
        )
        error._take(replace(diagnostic, severity=Severity.ERROR))
        return error

    @classmethod
    def _reason_in(cls, text: str) -> str:
        """The code in the text of such an error, as Python prints it at the end of a traceback."""
        name = re.escape(f"{cls.__module__}.{cls.__qualname__}")
        codes: list[str] = re.findall(rf"^{name}: \[(\w+)\] ", text, re.MULTILINE)
        return codes[-1] if codes else "reraised"

    def __str__(self) -> str:
        return str(self.diagnostic)

    def __reduce__(self) -> tuple[object, ...]:
        notes = {name: value for name, value in vars(self).items() if name != "diagnostic"}
        return type(self).of, (self.diagnostic,), notes


class RecfxWarning(UserWarning):
    """Something works, but probably not as it was meant: a reason of level warning, given once at the conversion.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     model = recfx.convert(Model(), hashing=recfx.HashConfig(admit_after=3))
        >>> [warning.message.diagnostic.code for warning in caught]
        ['index_settings_not_used']

    Attributes:
        diagnostic: what the report has, with the reason code.
    """

    diagnostic: Diagnostic

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic)
        self.diagnostic = diagnostic


class ConversionError(RecfxError, ValueError):
    """A model, a table or a setting cannot be converted. The model is as it was.

    Example:
        >>> recfx.convert(torch.nn.Linear(2, 2))
        Traceback (most recent call last):
        recfx.errors.ConversionError: [no_collection] ...
    """


class VersionError(RecfxError, ImportError):
    """A package that recfx needs is missing, or of a version that does not fit the others. recfx is not imported."""


class TableFullError(RecfxError, RuntimeError):
    """An id needs a row and its bucket has none left. The table is as it was before the batch.

    Example:
        >>> recfx.HashIndex(2).find_or_insert(torch.tensor([7, 8, 9]))
        Traceback (most recent call last):
        recfx.errors.TableFullError: [table_full] table: bucket 0 of 1 ...
    """


class OutOfStepError(RecfxError, RuntimeError):
    """Ranks are not at the same place in a step, or one of them failed in the middle of it. Nothing more was sent.

    Example:
        >>> try:
        ...     output = recfx.convert(Model())(batch)
        ... except recfx.OutOfStepError as error:
        ...     print("rank failed:", error.reason)
    """


class CheckpointError(RecfxError, RuntimeError):
    """A saved state is damaged, or belongs to something else. The model is as it was.

    Example:
        >>> recfx.load_checkpoint(Model(), "nowhere")
        Traceback (most recent call last):
        recfx.errors.CheckpointError: [checkpoint_missing] ...
    """


class ExportError(RecfxError, RuntimeError):
    """A model cannot be exported, or an exported file cannot be used.

    Example:
        >>> recfx.load("nothing.pt")
        Traceback (most recent call last):
        recfx.errors.ExportError: [no_file] ...
    """


class DrawingError(RecfxError, RuntimeError):
    """A model cannot be drawn, or its picture cannot be written. A file that was there before is as it was.

    Example:
        >>> recfx.draw(Model(), "model.gif")
        Traceback (most recent call last):
        recfx.errors.DrawingError: [unknown_ending] ...
    """


class InputError(RecfxError, ValueError):
    """A batch does not fit the collection it was given to. Nothing was looked up, inserted or updated there.

    Other collections of the model may have given rows to new ids in the same forward: these hold initial weights.

    Example:
        >>> recfx.HashIndex(100).find(torch.tensor([1.5]))
        Traceback (most recent call last):
        recfx.errors.IdTypeError: [wrong_id_dtype] ...
    """


class MissingFeatureError(InputError, KeyError):
    """The batch lacks a feature that the collection needs."""


class IdRangeError(InputError, IndexError):
    """An id is outside a table that has no index."""


class IdTypeError(InputError, TypeError):
    """The ids are not integers."""


def told_by(error: Exception, otherwise: str) -> tuple[str, str]:
    """What an error says, as a whole sentence, and its own advice, or ``otherwise`` if it has none.

    An error that is raised because of another one passes its advice on, rather than give a second one.
    """
    if isinstance(error, RecfxError):
        return str(replace(error.diagnostic, what_to_do="")), error.what_to_do or otherwise
    text = f"{type(error).__name__}: {error}".rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}.", otherwise


def did_you_mean(name: object, names: Iterable[object], by: bool = False) -> str:
    """`` (did you mean 'user'?)`` for a name that is none of ``names``, if one of these is near; otherwise nothing.

    Args:
        name: what was passed; with ``by``, what was to be passed.
        names: what could have been meant; with ``by``, what was passed instead.
        by: say `` (did you mean it by 'user'?)``.
    """
    nearest = difflib.get_close_matches(str(name), list(map(str, names)), 1, 0.7)
    return f" (did you mean {'it by ' if by else ''}{nearest[0]!r}?)" if nearest else ""


def type_of(value: object) -> str:
    """What a user has passed, as messages name it: ``an int``, ``a Tensor``, ``the class Tensor``, ``None``."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else with_article(type(value).__name__)


def below_current(path: Path) -> Path:
    """A path below the current directory, without that; any other path, and all if that is deleted, as they are."""
    with suppress(OSError):
        current = Path.cwd()
        return path.relative_to(current) if path.is_relative_to(current) else path
    return path


def with_article(name: str) -> str:
    """``an Adam``, ``a Tensor``."""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def few(names: Sequence[str], most: int) -> str:
    """``table_0..25``, or ``user, item, page and 4 more``.

    Args:
        names: the names, in the order in which they are shown.
        most: how many names, or runs of at least three names with consecutive numbers, are written out.
    """
    runs: list[list[str]] = []
    for name in names:
        numbered = _NUMBERED.fullmatch(runs[-1][-1]) if runs else None
        if numbered is not None and name == f"{numbered[1]}{int(numbered[2]) + 1}":
            runs[-1].append(name)
        else:
            runs.append([name])
    shown: list[tuple[str, int]] = []
    for run in runs:
        last = _NUMBERED.fullmatch(run[-1])
        if len(run) >= 3 and last is not None:
            shown.append((f"{run[0]}..{last[2]}", len(run)))
        else:
            shown += [(name, 1) for name in run]
    rest = sum(count for _, count in shown[most:])
    return ", ".join(text for text, _ in shown[:most]) + (f" and {rest:,} more" if rest else "")


def plural(count: int, noun: str) -> str:
    """``1 table``, ``1,000 tables``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
