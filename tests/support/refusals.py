"""What a refusal must say: its type, its reason code and, if one is given, the path of its module and its text."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

import recfx


@contextlib.contextmanager
def refused(
    reason: str,
    path: str | None = None,
    *,
    match: str | re.Pattern[str] | None = None,
    error: type[Exception] = recfx.ConversionError,
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block must raise ``error`` with this reason code; what it raised is the ``value`` of the result."""
    with pytest.raises(error, match=match) as caught:
        yield caught
    raised: Any = caught.value
    assert raised.reason == reason
    assert path is None or raised.module_path == path
