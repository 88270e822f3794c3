"""A diagnostic as a value, and raised: nothing is lost from one to the other."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import recfx
from recfx import errors
from recfx.errors import Diagnostic, Severity
from tests.support.refusals import refused

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
    with refused("wrong_id_dtype", error=errors.IdTypeError):
        next(items)


def test_what_is_raised_is_an_error() -> None:
    note = Diagnostic("has_index", "ebc", "ids are raw.")
    assert note.severity is Severity.INFO
    assert errors.ConversionError.of(note).diagnostic == dataclasses.replace(note, severity=Severity.ERROR)
    assert note.severity is Severity.INFO
