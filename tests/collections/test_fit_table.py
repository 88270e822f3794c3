"""What saved rows and indexes fit a table: one place decides, and every way of loading asks it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recfx
from recfx.collections.fit_table import first_rows, fit_index, saved_shape, without_index
from recfx.errors import CheckpointError
from recfx.hashing import HashConfig, HashIndex, state
from recfx.hashing.row_move import RowMove
from recfx.planner.torchrec_entry import extend_torchrec
from tests.support.refusals import refused

PRODUCT = Path(recfx.__file__).parent


def _index(rows: int, ids: range = range(0)) -> HashIndex:
    index = HashIndex(rows, config=HashConfig(buckets=1), name="t")
    if len(ids):
        index.find_or_insert(torch.tensor(ids))
    return index


def _saved(index: HashIndex) -> dict[str, Any]:
    return dict(index.state_dict())


@pytest.mark.parametrize(
    ("weight", "fits"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(8, 4), False),
        (torch.zeros(9, 4), False),
        (torch.zeros(3, 5), False),
        (torch.zeros(12), False),
        ("no tensor", False),
        (None, False),
    ],
    ids=["fewer rows", "as many", "more", "columns", "dims", "kind", "none"],
)
def test_only_a_smaller_table_of_the_same_columns_is_the_first_rows(weight: object, fits: bool) -> None:
    move = first_rows(weight, rows=8, dim=4)
    assert (move is not None) is fits
    if isinstance(weight, Tensor) and move is not None:
        assert (move.saved_rows, move.old_rows.tolist(), move.new_rows.tolist()) == (3, [0, 1, 2], [0, 1, 2])


def test_the_shape_that_fits() -> None:
    assert saved_shape(8, 4, None) == (8, 4)
    assert saved_shape(8, 4, RowMove.keep_first(3)) == (3, 4)


class Asks(nn.Module):
    """Notes what an index would do, from inside ``load_state_dict``."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.answers = [
            without_index(has_weight=has_weight, holds_ids=lambda: holds_ids)  # noqa: B023 called at once
            for has_weight in (False, True)
            for holds_ids in (False, True)
        ]


@pytest.mark.parametrize(
    ("strict", "with_weight_and_ids"), [(True, state.FORGET), (False, state.KEEP)], ids=["strict", "not strict"]
)
def test_an_index_that_nothing_was_saved_for(strict: bool, with_weight_and_ids: str) -> None:
    extend_torchrec()  # as the first conversion does; whether a load is strict is known from then on
    asks = Asks()
    asks.load_state_dict({}, strict=strict)
    assert asks.answers == [state.KEEP, state.KEEP, state.FORGET, with_weight_and_ids]


def test_an_index_gets_as_many_rows_as_the_table_has() -> None:
    small, big = _index(4, range(100, 103)), _index(8)
    buffers, move = fit_index(big, _saved(small), torch.zeros(4, 2), dim=2)
    assert move is not None
    assert move.saved_rows == 4
    big.load_state_dict({name: value for name, value in buffers.items() if isinstance(value, Tensor)})
    assert sorted(big.items()[0].tolist()) == [100, 101, 102]
    assert fit_index(_index(4), _saved(small), torch.zeros(4, 2), dim=2)[1] is None


@pytest.mark.parametrize(
    ("weight", "reason"), [(torch.zeros(3, 2), "torn_state"), (torch.zeros(4, 3), "columns_mismatch")]
)
def test_a_weight_that_does_not_go_with_the_index(weight: Tensor, reason: str) -> None:
    with refused(reason, "t", error=CheckpointError):
        fit_index(_index(4), _saved(_index(4, range(100, 103))), weight, dim=2)


def test_the_part_of_a_move_that_ends_in_a_slice() -> None:
    move = RowMove(5, torch.tensor([0, 2, 4]), torch.tensor([1, 4, 6]))
    part = move.within(4, 7)
    assert (part.saved_rows, part.old_rows.tolist(), part.new_rows.tolist()) == (5, [2, 4], [0, 2])
    assert part.apply(torch.arange(5.0), torch.full((3,), -1.0)).tolist() == [2.0, -1.0, 4.0]


def test_nobody_else_decides_what_fits() -> None:
    files = {
        path.relative_to(PRODUCT).as_posix()
        for path in PRODUCT.rglob("*.py")
        if re.search(r"(?<!def )\b(fit_rows|check_saved_index|RowMove\.keep_first|STRICT\.get)\(", path.read_text())
    }
    assert files == {"collections/fit_table.py", "collections/sharding/state.py"}
