"""Marks: which call they identify, and what all ranks conclude from the same ones."""

from typing import Any, cast

import pytest
import torch

from recfx.errors import OutOfStepError
from recfx.runtime import marks
from recfx.runtime.marks import AHEAD, EVALUATES, LACKS, LAST, NO_GRADIENTS, REFUSED, TRAINS, Backwards

USER = marks.identity("user", ["f1"], [1, 0])
ITEM = marks.identity("item", ["f2"], [0, 1])
ROOT = marks.identity("", ["f3"], [1, 1])


def test_a_mark_fits_its_message_and_is_the_same_in_every_process() -> None:
    assert len({USER, ITEM, ROOT, marks.identity("user", ["f2"], [1, 0]), marks.identity("user", ["f1"], [0, 1])}) == 5
    assert marks.identity("user", ["f1"], [1, 0]) == USER
    for mark in (USER, ITEM, ROOT):
        assert 0 < mark < 2**62
        assert mark & 0xFF == 0, "the bits of what a rank says are free"
    assert sorted([REFUSED, LAST, AHEAD]) == [1, 2, 8]


@pytest.mark.parametrize("says", [0, REFUSED, LAST, LACKS, REFUSED | LAST | LACKS])
def test_what_a_rank_says_of_its_batch_is_no_other_call(says: int) -> None:
    assert marks.other_calls([USER, USER | says], "user") is None


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (ITEM, "rank 0 calls 'user'; rank 1 calls 'item'."),
        (ROOT | LAST, "rank 0 calls 'user'; rank 1 calls the collection of feature 'f3'."),
        (USER | AHEAD, "rank 0 calls 'user'; rank 1 calls 'user' ahead of its step."),
        (12345 << 22, "rank 0 calls 'user'; rank 1 is at a call that this rank does not know."),
    ],
)
def test_different_calls_are_named(mark: int, words: str) -> None:
    for error in (marks.other_calls([USER, mark], "user"), marks.verdict([USER, mark | REFUSED], "user")):
        assert isinstance(error, OutOfStepError)
        assert (error.reason, error.module_path) == ("ranks_at_different_calls", "user")
        assert f"ranks are at different calls: {words} No ids were sent" in str(error)
        assert error.what_to_do


def test_calls_in_different_modes_are_different_calls() -> None:
    mine, other = USER | TRAINS, USER | EVALUATES | NO_GRADIENTS
    assert marks.says(True) | USER == mine
    with torch.no_grad():
        assert marks.says(False) | USER == other
    error = marks.other_calls([mine, other | REFUSED, mine | LAST], "user")
    assert error is not None
    assert error.by_all_ranks
    where = "rank 0 calls 'user' in training mode; rank 1 calls 'user' in eval mode without gradients; rank 2 calls"
    assert where in str(error)
    joint = [marks.joint([mine, ITEM | of_item]) for of_item in (TRAINS, EVALUATES)]
    where = "rank 1 calls 'user' in training mode, 'item' in eval mode together."
    assert where in str(marks.other_calls(joint, "user"))


@pytest.mark.parametrize(
    ("calls", "others"), [((), (1,)), ((1,), (1, 1)), ((1,), (2,)), ((1, 2), (3,)), ((1,) * 9, ())]
)
def test_backwards_that_not_all_ranks_have_run(calls: tuple[int, ...], others: tuple[int, ...]) -> None:
    said = []
    for run in (calls, others):
        of_rank = Backwards("user")
        for call in run:
            of_rank.run(call)
        said.append(USER | marks.says(True, of_rank.begin_call()[1]))
        assert of_rank.begin_call() == (2, 0)
    error = marks.other_calls(said, "user")
    assert error is not None
    assert (error.reason, error.module_path) == ("backward_on_some_ranks", "user")
    assert of_rank.begin_call() == (1, 0), "after the error, all ranks begin anew"


def test_collections_of_equal_paths_are_told_apart_by_the_order_in_which_they_were_sharded() -> None:
    first, second = (marks.identity("user", ["f1"], [1, 0], order=order) for order in (1, 2))
    where = [f"rank {rank} calls 'user' (number {rank + 1} of the" for rank in (0, 1)]
    assert all(words in str(marks.other_calls([first, second], "user")) for words in where)
    where = [f"rank {rank} calls 'user' together (number {rank + 1} of the" for rank in (0, 1)]
    joint = [marks.joint([call]) for call in (first, second)]
    assert all(words in str(marks.other_calls(joint, "user")) for words in where)


def test_backwards_of_two_calls_in_another_order_have_another_mark() -> None:
    """But for one in 8,192 by chance: 78 of these 100 had the same one when Python's ``hash`` was summed."""

    def mark(before: int, turned: bool) -> int:
        of_rank = Backwards("user")
        of_rank.forget()
        for _ in range(before):
            of_rank.run(of_rank.begin_call()[0])
        calls = [of_rank.begin_call()[0], of_rank.begin_call()[0]]
        for call in calls[::-1] if turned else calls:
            of_rank.run(call)
        return USER | marks.says(True, of_rank.begin_call()[1])

    assert sum(mark(before, False) == mark(before, True) for before in range(100)) <= 1


def test_an_error_in_one_group_says_nothing_of_backwards_in_another() -> None:
    """Ranks that are not in the first group would otherwise know of other backwards than those that are."""
    here, elsewhere = (Backwards("user", cast(Any, frozenset({group}))) for group in range(2))
    for of_group in (here, elsewhere):
        of_group.run(of_group.begin_call()[0])
    assert marks.other_calls([USER, ITEM], "user", here._group) is not None
    assert here.since_call() == 0
    assert elsewhere.since_call() != 0
