"""torch.distributed.checkpoint: saved on N ranks, loaded on M, under other plans, and by plain models; to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import recfx
from recfx.collections.sharding.gather import gather_tables
from tests.sharding.cases import Case
from tests.sharding.ranks import ranks
from tests.sharding.stateful import (
    ADMIT,
    LRU,
    assert_same,
    case_of,
    in_kinds,
    load_dcp,
    make,
    save_dcp,
    sharded_of,
    train,
    whole_state,
)

STEPS = 4


def save(
    rank: int, world_size: int, case: Case, folder: str, from_folder: str = "", last: int = STEPS
) -> dict[str, Any]:
    model = make(case, world_size)
    first = 0
    if from_folder:
        load_dcp(model, from_folder)
        first = STEPS
    train(model, case, rank, world_size, first, last)
    save_dcp(model, folder)
    return whole_state(model)


def load(rank: int, world_size: int, case: Case, folder: str) -> dict[str, Any]:
    model = make(case, world_size, seed=5)
    train(model, case, rank, world_size, 0, 1)  # not a fresh one
    load_dcp(model, folder)
    return whole_state(model)


@pytest.mark.parametrize(
    ("hashing", "optimizer"), [(LRU, "adagrad"), (ADMIT, "adam"), (None, "adagrad")], ids=["lru", "admit", "static"]
)
def test_any_number_of_ranks_loads_what_any_number_saved(
    tmp_path: Path, hashing: recfx.HashConfig | None, optimizer: str
) -> None:
    def case(plan: str, world_size: int) -> Case:
        return in_kinds(case_of(plan, hashing, optimizer, world_size))["mixed"]

    saved = {"plain": save(0, 0, case("tables", 0), str(tmp_path / "plain"))}
    for world_size, plan in ((2, "mixed"), (3, "columns"), (2, "rows")):
        name = f"{plan}{world_size}"
        saved[name] = ranks(world_size).run(save, case(plan, world_size), str(tmp_path / name))[0]
        assert_same(saved[name], saved["plain"], exact=False)
    targets = [(2, "columns"), (3, "mixed"), (2, "replicas"), (3, "rows")]
    turned = {"adagrad": 0, "adam": 1}[optimizer] + (hashing is None)  # so that each is loaded by several
    for number, (name, expected) in enumerate(saved.items()):
        world_size, plan = targets[(number + turned) % 4]
        for state in ranks(world_size).run(load, case(plan, world_size), str(tmp_path / name)):
            assert_same(state, expected)
        assert_same(load(0, 0, case("tables", 0), str(tmp_path / name)), expected)


def test_grids_and_host_rows_on_four_ranks_and_one(tmp_path: Path) -> None:
    """Column blocks of a grid are cut by rows, and each has a copy of the index."""
    cases = {
        (size, plan): case_of(plan, LRU, "adam", size) for size, plan in ((4, "mixed"), (1, "columns"), (4, "rows"))
    }
    saved = ranks(4).run(save, cases[4, "mixed"], str(tmp_path / "four"))[0]
    for (world_size, _), case in cases.items():
        for state in ranks(world_size).run(load, case, str(tmp_path / "four")):
            assert_same(state, saved)
    ranks(1).run(save, cases[1, "columns"], str(tmp_path / "one"))
    assert len({str(counts) for counts in ranks(4).run(load_counts, cases[4, "mixed"], str(tmp_path / "one"))}) == 1


def load_counts(rank: int, world_size: int, case: Case, folder: str) -> list[int]:
    """Batches and statistics of every table after loading, summed over slices."""
    model = make(case, world_size)
    load_dcp(model, folder)
    tables = gather_tables(sharded_of(model))
    assert all(int(table.index["counts"][1]) > 0 for table in tables.values())
    return [int(table.index["counts"][0]) for table in tables.values()]


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """2 -> 3 -> 1 ranks; against the same ranks that did not stop in between."""
    two, three = case_of("mixed", LRU, "adagrad", 2), case_of("rows", LRU, "adagrad", 3)
    ranks(2).run(save, two, str(tmp_path / "two"))
    stopped = ranks(3).run(save, three, str(tmp_path / "three"), str(tmp_path / "two"), 2 * STEPS)[0]
    went_on = ranks(3).run(go_on, three, str(tmp_path / "two"), 2 * STEPS, 3 * STEPS)[0]
    again = ranks(3).run(go_on, three, str(tmp_path / "three"), 2 * STEPS, 3 * STEPS, True)[0]
    assert_same(again, went_on)
    plain = make(two, 0, seed=5)
    load_dcp(plain, str(tmp_path / "three"))
    assert_same(whole_state(plain), stopped)
    train(plain, two, 0, 0, 2 * STEPS, 3 * STEPS)
    assert_same(whole_state(plain), went_on, exact=False)


def go_on(
    rank: int, world_size: int, case: Case, folder: str, first: int, last: int, stopped: bool = False
) -> dict[str, Any]:
    """From a checkpoint of step ``STEPS``, or of step ``first``, to the last step."""
    model = make(case, world_size, seed=9 if stopped else 0)
    load_dcp(model, folder)
    train(model, case, rank, world_size, first if stopped else STEPS, last)
    return whole_state(model)


def in_place(rank: int, world_size: int, case: Case, folder: str) -> dict[str, Any]:
    """As DCP leaves the tensors, without ``load_state_dict``."""
    model = make(case, world_size, seed=5)
    train(model, case, rank, world_size, 0, 1)
    load_dcp(model, folder, in_place=True)
    train(model, case, rank, world_size, STEPS, STEPS + 2)
    return whole_state(model)


def test_what_is_loaded_in_place_counts_in_every_column_shard(tmp_path: Path) -> None:
    case = case_of("columns", LRU, "adagrad", 2)
    ranks(2).run(save, case, str(tmp_path / "saved"))
    state = ranks(2).run(in_place, case, str(tmp_path / "saved"))[0]
    assert_same(state, ranks(2).run(go_on, case, str(tmp_path / "saved"), STEPS, STEPS + 2, True)[0])
