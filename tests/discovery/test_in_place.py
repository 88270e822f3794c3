"""Value ranges of ids that may be changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recfx.discovery.discover import discover
from recfx.discovery.sample import Sample
from tests.discovery.models_of_ids import Model, batch, extremes, range_of

# fmt: off
CHANGED: dict[str, Callable[[Any, Tensor], Any]] = {
    "in place": lambda self, ids: (ids % 10).add_(500),
    "out": lambda self, ids: _out(ids % 10),
    "+=": lambda self, ids: _add_to(ids % 10),
    "an operator in place": lambda self, ids: torch.ops.aten.add_.Scalar(ids % 10, 500),
    "by code that is not traced": lambda self, ids: _after(ids % 10, self.shift),
    "through a view": lambda self, ids: _after(ids % 10, lambda same: self.shift(same.view(-1))),
    "by a module of torch": lambda self, ids: _after(ids % 10, self.passes_on),
}
# fmt: on


@pytest.mark.parametrize("case", CHANGED)
def test_nothing_is_known_of_ids_that_may_be_changed_in_place(case: str) -> None:
    model = Model(CHANGED[case])
    assert range_of(model, batch(extremes(torch.int64))) is None
    for dtype in (torch.int64, torch.int32):
        assert int(CHANGED[case](model, extremes(dtype)).max()) > 9  # they are no remainders any more


def test_what_comes_after_the_change_is_known() -> None:
    found = range_of(Model(lambda self, ids: _after(ids.clone(), self.shift) % 10), batch(extremes(torch.int64)))
    assert str(found) == "0 to 9"


def test_nothing_is_known_of_code_that_cannot_be_traced() -> None:
    (finding,) = discover(Model(lambda self, ids: _set(ids % 10)), Sample(batch([1, 2]))).findings
    assert (finding.found, finding.id_ranges) == ("walked", {})


def _add_to(ids: Tensor) -> Tensor:
    same = ids
    same += 500
    return ids


def _after(ids: Tensor, call: Callable[[Tensor], Any]) -> Tensor:
    call(ids)
    return ids


def _set(ids: Tensor) -> Tensor:
    ids[0] = 500
    return ids


def _out(ids: Tensor) -> Tensor:
    torch.add(ids, 500, out=ids)
    return ids
