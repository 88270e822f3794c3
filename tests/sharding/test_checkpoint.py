"""Checkpoints of sharded models, recfx's and torch's own: saved on N ranks, loaded on M; to the bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import recfx
from recfx.checkpoint.tables import tables_of as tables_in
from recfx.errors import CheckpointError
from tests.sharding.cases import Case
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.stateful import LRU, assert_equal, case_of, in_kinds, make, tables_of, train

STEPS = 3


def save(rank: int, world_size: int, case: Case, folder: str) -> dict[str, torch.Tensor]:
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, STEPS)
    with torch.no_grad():
        model.get_parameter("over.weight").add_(rank)  # rank 0's is saved
    recfx.save_checkpoint(model, folder)
    return tables_of(model)


def load(rank: int, world_size: int, case: Case, folder: str) -> dict[str, torch.Tensor]:
    model = make(case, world_size, seed=5)
    train(model, case, rank, world_size, 0, 1)  # not a fresh one
    recfx.load_checkpoint(model, folder)
    return tables_of(model)


def before_a_step(rank: int, world_size: int, case: Case, folder: str) -> None:
    model = make(case, world_size, seed=5)
    train(model, case, rank, world_size, 0, STEPS)
    recfx.load_checkpoint(model, folder)
    states = {name: value for name, value in tables_of(model).items() if ".optimizer." in name}
    assert {name.rpartition(".")[2] for name in states} == {"step", "exp_avg", "exp_avg_sq"}
    assert not any(bool(value.any()) for value in states.values())


def test_optimizers_that_had_made_no_step_start_anew(tmp_path: Path) -> None:
    recfx.save_checkpoint(make(case_of("tables", optimizer="adam"), 0), tmp_path)
    ranks(2).run(before_a_step, case_of("mixed", optimizer="adam"), str(tmp_path))


def more_rows(rank: int, world_size: int, case: Case, folder: str, weights: dict[str, Any]) -> None:
    model = make(case, world_size, seed=5)
    train(model, case, rank, world_size, 0, 2 * STEPS)
    recfx.load_checkpoint(model, folder)
    tensors = tables_of(model)
    for table, by_id in weights.items():
        ids, rows = tensors[f"{table}.index.row_ids"], tensors[f"{table}.weight"]
        states = tensors[f"{table}.optimizer.sum"]
        taken = tensors[f"{table}.index.row_state"] == recfx.kernels.index.index_buffers.TAKEN
        assert bool((states[~taken] == 0.5).all())  # the rows that other ids had here start anew
        for row in torch.nonzero(taken).flatten():
            weight, state = by_id.pop(int(ids[row]))
            assert torch.equal(rows[row], weight)
            assert torch.equal(states[row], state)
        assert not by_id


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_ids_keep_their_rows_in_bigger_tables(tmp_path: Path, kind: str) -> None:
    """And rows without an id hold the state that a new row has: Adagrad's sums do not start from 0 here."""
    optimizer = "adagrad_from_a_half"
    saved = save(0, 0, in_kinds(case_of("tables", optimizer=optimizer))[kind], str(tmp_path))
    weights = {
        table: {
            int(saved[f"{table}.index.row_ids"][row]): (
                saved[f"{table}.weight"][row],
                saved[f"{table}.optimizer.sum"][row],
            )
            for row in torch.nonzero(saved[f"{table}.index.row_state"] == 1).flatten()
        }
        for table in "abcd"
    }
    bigger = replace(LRU, rows=130)
    ranks(2).run(more_rows, in_kinds(case_of("mixed", bigger, optimizer))[kind], str(tmp_path), weights)


def interrupted(rank: int, world_size: int, case: Case, folder: str) -> dict[str, torch.Tensor]:
    """Load, but for Ctrl-C on one rank; and load again."""
    model = make(case, world_size, seed=5)
    train(model, case, rank, world_size, 0, 1)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("recfx.checkpoint.tables.TablePlan.carry_out", fail)
        with pytest.raises(KeyboardInterrupt if rank == 1 else CheckpointError):
            recfx.load_checkpoint(model, folder)
    if rank == 1:
        indexes = [index for table in tables_in(model) for index in table.indexes]
        assert indexes
        for index in indexes:
            with pytest.raises(CheckpointError, match="load_interrupted"):
                len(index)
    recfx.load_checkpoint(model, folder)
    return tables_of(model)


@pytest.mark.parametrize("kind", ["pooled", "mixed"])
def test_what_was_interrupted_on_one_rank_is_loaded_again(tmp_path: Path, kind: str) -> None:
    saved = ranks(2).run(save, in_kinds(case_of("mixed"))[kind], str(tmp_path))[0]
    for loaded in ranks(2).run(interrupted, in_kinds(case_of("columns"))[kind], str(tmp_path)):
        assert_equal(loaded, saved)


def refused(rank: int, world_size: int, case: Case, folder: str, fails_on_one: str = "") -> str:
    """Why a load is refused, which changes nothing; ``fails_on_one``: the function that fails on rank 1."""
    model = make(case, world_size, seed=5)
    train(model, case, rank, world_size, 0, 1)
    before = tables_of(model)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and fails_on_one:
            patch.setattr(fails_on_one, lambda *_: 1 / 0)
        with pytest.raises((CheckpointError, ZeroDivisionError)) as caught:
            recfx.load_checkpoint(model, folder)
    assert_equal(tables_of(model), before)
    return str(getattr(caught.value, "reason", "ZeroDivisionError"))


def fail_on(rank: int, world_size: int, case: Case, folder: str, where: str) -> str:
    """Save while one rank cannot write, or while the first cannot switch."""
    model = make(case, world_size)

    def fail(*_: Any) -> None:
        raise OSError("no space left on this rank")

    with pytest.MonkeyPatch.context() as patch:
        if where == "data" and rank == 1:
            patch.setattr(FileSystemWriter, "write_data", fail)
        if where == "manifest":
            patch.setattr("recfx.checkpoint.directory.Manifest.switch", fail)
        if where == "index" and rank == 1:
            patch.setattr("recfx.checkpoint.save.describe_in_backward", fail)
        with pytest.raises((CheckpointError, OSError), match="no space left on this rank") as caught:
            recfx.save_checkpoint(model, folder)
    return str(getattr(caught.value, "reason", "OSError"))


@on_ranks(2)
def test_ranks_that_name_different_directories_are_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    model, reasons = make(case_of("mixed"), world_size), []
    recfx.save_checkpoint(model, tmp_path / "0")
    for call, name in ((recfx.load_checkpoint, rank), (recfx.save_checkpoint, 2 * rank)):
        with pytest.raises(CheckpointError) as caught:
            call(model, tmp_path / str(name))
        reasons.append(caught.value.reason)
    assert reasons == ["checkpoint_torn", "checkpoint_not_written"]


def test_a_rank_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    case = case_of("mixed")
    saved = ranks(2).run(save, case, str(tmp_path))[0]
    files = sorted(tmp_path.iterdir())
    for where, left in (("data", 0), ("manifest", 1), ("index", 1)):  # the next save deletes what is left
        reasons = ranks(2).run(fail_on, case, str(tmp_path), where)
        assert where == "index" or reasons == ["checkpoint_not_written"] * 2
        found = sorted(tmp_path.iterdir())
        assert set(files) <= set(found)
        assert len(found) == len(files) + left
    assert_equal(ranks(2).run(load, case, str(tmp_path))[0], saved)


def test_what_is_wrong_changes_nothing_on_any_rank(tmp_path: Path) -> None:
    case = case_of("mixed")
    assert ranks(2).run(refused, case, str(tmp_path / "none")) == ["checkpoint_missing"] * 2
    saved = tmp_path / "saved"
    ranks(2).run(save, case, str(saved))
    seeded = replace(case, hashing=replace(LRU, seed=99))
    assert ranks(2).run(refused, seeded, str(saved)) == ["wrong_seed"] * 2
    adam = replace(case, optimizer="adam")
    assert ranks(2).run(refused, adam, str(saved)) == ["checkpoint_mismatch"] * 2
    (data,) = saved.glob("data-*/__1_0.distcp")
    with open(data, "r+b") as file:
        file.seek(data.stat().st_size // 2)
        file.write(b"?!")
    assert ranks(2).run(refused, case, str(saved)) == ["checkpoint_torn"] * 2


@pytest.mark.parametrize(
    "function",
    [
        "recfx.checkpoint.tables.check_saved_as",
        "recfx.checkpoint.storage.SavedFolder.read_into",  # a disk that fails after rank 0 has verified all files
    ],
)
def test_what_one_rank_cannot_load_none_loads(function: str, tmp_path: Path) -> None:
    save(0, 0, case_of("tables"), str(tmp_path))
    expected = ["other_rank_failed", "ZeroDivisionError"]
    assert ranks(2).run(refused, case_of("rows"), str(tmp_path), function) == expected


@on_ranks(2)
def test_a_directory_that_is_none_on_one_rank_is_none_on_all(rank: int, world_size: int, tmp_path: Path) -> None:
    model = make(case_of("mixed"), world_size)
    for call in (recfx.save_checkpoint, recfx.load_checkpoint):
        with pytest.raises(CheckpointError, match="invalid_argument"):
            call(model, tmp_path / "d" if rank == 0 else 3)  # type: ignore[arg-type]
    assert not (tmp_path / "d").exists()
