"""A diagnostic as a value, and raised: nothing is lost from one to the other."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from recfx import errors
from recfx.diagnostics import Diagnostic, Severity

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RecfxError)]
FULL = Diagnostic(
    "dtype", "sparse.ebc", "it takes float32.", "cast it.", Severity.ERROR, by="fbgemm", node="ebc_lookup"
)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: type[errors.RecfxError]) -> None:
    error = kind.of(FULL)
    assert type(error) is kind
    assert error.diagnostic == FULL
    for duplicate in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(duplicate) is kind
        assert duplicate.diagnostic == FULL


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_raised_error_carries(kind: type[errors.RecfxError]) -> None:
    error = kind("it takes float32.", reason="dtype", module_path="sparse.ebc", what_to_do="cast it.")
    assert error.diagnostic == dataclasses.replace(FULL, by="", node="")
    assert (error.message, error.reason) == ("it takes float32.", "dtype")
    assert (error.module_path, error.what_to_do) == ("sparse.ebc", "cast it.")


@pytest.mark.parametrize(
    ("diagnostic", "text"),
    [
        (FULL, "[dtype] sparse.ebc: it takes float32. What to do: cast it."),
        (Diagnostic("dtype", "", "it takes float32."), "[dtype] it takes float32."),
        (Diagnostic("dtype", "ebc", "it takes float32."), "[dtype] ebc: it takes float32."),
        (Diagnostic("dtype", "", "it takes float32.", "cast it."), "[dtype] it takes float32. What to do: cast it."),
    ],
)
def test_text(diagnostic: Diagnostic, text: str) -> None:
    assert str(diagnostic) == str(errors.InputError.of(diagnostic)) == text


def test_what_is_raised_is_an_error() -> None:
    note = Diagnostic("has_index", "ebc", "ids are raw.")
    assert note.severity is Severity.INFO
    assert errors.ConversionError.of(note).diagnostic == dataclasses.replace(note, severity=Severity.ERROR)
    assert note.severity is Severity.INFO


def test_a_diagnostic_stays_as_it_is() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.code = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        errors.InputError.of(FULL).module_path = "other"  # type: ignore[misc]
    assert len({FULL, dataclasses.replace(FULL), dataclasses.replace(FULL, node="")}) == 2


def test_severities_are_words_in_order() -> None:
    assert [f"{severity}" for severity in Severity] == ["error", "warning", "info"]
    assert [severity.rank for severity in (Severity.INFO, Severity.ERROR, Severity.WARNING)] == [2, 0, 1]
    assert Severity("warning") is Severity.WARNING
