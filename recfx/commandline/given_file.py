"""A file that the command line names: it stays where the shell was, wherever the user's factory goes."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from pathlib import Path


class GivenFile:
    """Reads an argument, as a ``type`` of ``argparse``. ``str()`` is the path as it was typed.

    Attributes:
        path: the absolute path.
    """

    def __init__(self, text: str) -> None:
        self._typed = Path(text)
        try:
            self.path = self._typed.absolute()
        except OSError as error:
            raise ArgumentTypeError(f"{text}: the current directory cannot be found: {error.strerror}") from error

    def __str__(self) -> str:
        return str(self._typed)

    def _as_typed(self, text: str) -> str:
        text = text.replace(str(self.path), str(self._typed))
        folder = self._typed.parent
        return text if folder == Path() else text.replace(str(self.path.parent), str(folder))


def as_typed(text: str, given: Namespace) -> str:
    """A message in which the files of these arguments are named as they were typed."""
    for argument in vars(given).values():
        for value in argument if isinstance(argument, list) else [argument]:
            text = value._as_typed(text) if isinstance(value, GivenFile) else text
    return text
