"""A diagnostic as a value, and raised: nothing is lost from one to the other."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import recfx
from recfx import errors
from recfx.errors import Diagnostic, Severity

ROOT = Path(__file__).resolve().parents[1]
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
def test_notes_are_pickled_as_well(kind: type[errors.RecfxError]) -> None:
    error = kind.of(FULL)
    error.add_note("in step 7")
    duplicate = pickle.loads(pickle.dumps(error))
    assert duplicate.__notes__ == ["in step 7"]
    assert duplicate.diagnostic == FULL


class Refusing(Dataset[torch.Tensor]):
    """Raises another kind of error for every item; then one of recfx's own, in the code of an index."""

    def __len__(self) -> int:
        return len(KINDS) + 1

    def __getitem__(self, position: int) -> torch.Tensor:
        if position == len(KINDS):
            return recfx.HashIndex(8).find(torch.zeros(3))
        try:
            raise errors.OutOfStepError("it came first.", reason="first_cause")
        except errors.OutOfStepError as cause:
            raise KINDS[position].of(FULL) from cause


def test_errors_in_workers_of_a_data_loader_are_what_they_are() -> None:
    """torch raises them again, with the traceback of the worker as the message."""
    items = iter(DataLoader(Refusing(), num_workers=1, batch_size=None))
    for kind in KINDS:
        with pytest.raises(kind) as caught:
            next(items)
        assert type(caught.value) is kind
        assert caught.value.reason == FULL.code
        assert f"Caught {kind.__name__} in DataLoader worker process 0" in caught.value.message
        assert f": {FULL}\n" in str(caught.value)
        assert pickle.loads(pickle.dumps(caught.value)).diagnostic == caught.value.diagnostic
    with pytest.raises(errors.IdTypeError) as caught:
        next(items)
    assert caught.value.reason == "wrong_id_dtype"


def test_an_error_of_which_only_other_text_is_left() -> None:
    text = "recfx.errors.InputErrors: [dtype] and: recfx.errors.InputError: [dtype] in a line"
    assert errors.InputError(text).reason == errors.InputError("").reason == "reraised"


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


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "an int"), (torch.ones(1), "a Tensor"), ({}, "a dict"), (torch.nn.Identity(), "an Identity")],
)
def test_a_type_has_its_article(value: object, text: str) -> None:
    assert errors.type_of(value) == text
    with pytest.raises(recfx.ConversionError) as caught:
        recfx.cost(torch.nn.Identity(), value)
    assert caught.value.message.startswith(f"topology is {text}")


def test_no_message_guesses_the_article_of_a_type() -> None:
    sources = [path for folder in ("recfx", "lowering", "kernels") for path in (ROOT / folder).rglob("*.py")]
    guesses = [path.name for path in sources if re.search(r"\ban? \{type\(\w+\)\.__name__", path.read_text())]
    assert guesses == []
