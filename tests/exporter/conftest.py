"""What torch reads its classes' annotations for, when it loads a program, it reads again for every value of a file."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch._export.serde import schema, serialize


@pytest.fixture(scope="package", autouse=True)
def _annotations_are_read_once() -> Iterator[None]:
    once: Callable[[Any], dict[str, Any]] = functools.cache(
        lambda asked: typing.get_type_hints(asked, globalns=vars(schema))
    )
    remembering = types.ModuleType("typing")
    vars(remembering).update(vars(typing), get_type_hints=lambda asked, globalns: once(asked))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialize, "typing", remembering)
        yield
