"""All ranks tell each other what went wrong, and what they have: one place, with the same errors for everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import recfx
from recfx.collections.sharding.gather import together
from recfx.collections.sharding.ranks_agree import any_rank, on_all_ranks, tell_counts
from recfx.errors import OutOfStepError
from recfx.runtime import marks
from tests.sharding.ranks import ranks

PRODUCT = Path(recfx.__file__).parent


def _told(error: BaseException) -> Exception:
    return error if isinstance(error, OSError) else OSError(f"told of a {type(error).__name__}")


def raises(rank: int, world_size: int, failing: dict[int, str]) -> str:
    """What ``on_all_ranks`` gives or raises here where some ranks fail, and whether the group works after it."""

    def function() -> int:
        if failing.get(rank) == "error":
            raise OSError(f"rank {rank} says no")
        if failing.get(rank) == "interrupt":
            raise KeyboardInterrupt
        return rank * 10

    try:
        told = str(on_all_ranks(dist.group.WORLD, function, _told))
    except BaseException as error:
        told = f"{type(error).__name__} {error}".strip()
    dist.barrier()
    return told


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ({}, ["[0, 10]", "[0, 10]"]),
        ({1: "error"}, ["OSError rank 1 says no", "OSError rank 1 says no"]),
        ({0: "error", 1: "error"}, ["OSError rank 0 says no", "OSError rank 1 says no"]),
        ({0: "interrupt"}, ["KeyboardInterrupt", "OSError told of a KeyboardInterrupt"]),
    ],
    ids=["nobody", "one", "both", "interrupt"],
)
def test_an_error_on_one_rank_is_raised_on_all(failing: dict[int, str], expected: list[str]) -> None:
    assert ranks(2).run(raises, failing) == expected


def test_alone_a_function_is_called_once_and_its_error_is_its_own() -> None:
    assert on_all_ranks(None, lambda: 3, _told) == [3]
    with pytest.raises(KeyboardInterrupt):
        on_all_ranks(None, _interrupted, _told)


def _interrupted() -> None:
    raise KeyboardInterrupt


def untold(rank: int, world_size: int) -> int:
    """An error that nobody is told of is raised without a message: the other rank does not take part."""
    group = dist.group.WORLD
    assert group is not None
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            on_all_ranks(group, _interrupted, lambda error: None)
        with pytest.raises(KeyboardInterrupt):
            together(group, _interrupted)
    dist.barrier()
    return rank


def test_an_error_that_nobody_is_told_of_is_raised_at_once() -> None:
    assert ranks(2).run(untold) == [0, 1]


def flags(rank: int, world_size: int) -> list[bool]:
    group = dist.group.WORLD
    return [any_rank([group, None, group], flag) for flag in (False, rank == 1, True)] + [any_rank([], rank == 1)]


def test_a_flag_of_any_rank_is_one_of_all() -> None:
    assert ranks(2).run(flags) == [[False, True, True, False], [False, True, True, True]]


def counts(rank: int, world_size: int, same_call: bool) -> Any:
    assert dist.group.WORLD is not None
    name = "here" if same_call or rank == 0 else "elsewhere"
    try:
        return tell_counts(dist.group.WORLD, rank + 5, rank, marks.identity(name, [], []), "here")
    except OutOfStepError as error:
        return error.reason


@pytest.mark.parametrize(
    ("same_call", "expected"), [(True, [(5, 0), (6, 1)]), (False, "ranks_at_different_calls")], ids=["same", "other"]
)
def test_counts_are_told_to_ranks_at_the_same_call(same_call: bool, expected: object) -> None:
    assert ranks(2).run(counts, same_call) == [expected, expected]


@pytest.mark.parametrize("collective", ["all_gather_object(", "all_reduce("])
def test_nobody_else_asks_all_ranks(collective: str) -> None:
    files = [
        path.relative_to(PRODUCT).as_posix()
        for path in sorted(PRODUCT.rglob("*.py"))
        if f"dist.{collective}" in path.read_text()
    ]
    assert files == ["collections/sharding/ranks_agree.py"]
