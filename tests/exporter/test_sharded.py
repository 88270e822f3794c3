"""Sharded models, exported from all ranks: the file is that of the unsharded model."""

import errno
import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.collections.sharding.shard import shard_collection
from recfx.exporter import served_collection, tracked
from recfx.exporter.report import ExportReport
from recfx.runtime.dist_groups import wires_of
from tests.exporter.hashed_models import assert_same_file
from tests.sharding.cases import Case, Model, batches, build, concatenate, plan_of, with_optimizer
from tests.sharding.ranks import ranks
from tests.sharding.stateful import ADMIT, LRU, case_of, in_kinds, make, train


def sample_of(case: Case, seed: int = 5) -> KeyedJaggedTensor:
    return concatenate(batches(replace(case, seed=seed, sizes=(2,)), 3, 1)[0])


State = dict[str, torch.Tensor]


@functools.cache
def trained_alone(case: Case) -> nn.Module:
    """Trained before it is sharded, so that every rank has exactly its part of the same tables."""
    model = make(case, 0)
    train(model, case, 0, 0, 0, 3)
    return model


def sharded(case: Case, state: State, world_size: int) -> nn.Module:
    """The model with this state, sharded."""
    model = make(case, 0)
    model.load_state_dict(state)
    plan = plan_of(case, model.sparse, world_size)  # type: ignore[arg-type]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model.sparse = shard_collection(model.sparse, plan, env, wires=wires_of(case.codecs))  # type: ignore[arg-type]
    return model


def exported(
    rank: int, world_size: int, case: Case, before: State, path: Path, options: dict[str, Any]
) -> ExportReport:
    model = sharded(case, before, world_size)
    state = {name: value.clone() for name, value in _local_state(model).items()}
    report = recfx.export(model, path, sample_of(case, seed=rank), **options)
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in _local_state(model).items())
    return report


def _local_state(model: Any) -> dict[str, torch.Tensor]:
    indexes = {
        f"{name}.{key}": value for name, i in model.sparse.hash_indexes.items() for key, value in i._buffers.items()
    }
    return {**indexes, **dict(model.named_parameters())}


@pytest.mark.parametrize(
    ("kind", "plan", "hashing", "world_size", "options"),
    [
        ("pooled", "mixed", LRU, 1, {}),
        ("sequence", "tables", LRU, 2, {}),
        ("pooled", "rows", ADMIT, 2, {"quantize": "int8"}),
        ("pooled", "columns", None, 2, {}),
        ("sequence", "columns", ADMIT, 2, {"quantize": {"a": "int4", "sparse.d": "fp16"}}),
        ("pooled", "replicas", LRU, 2, {}),
        ("pooled", "mixed", ADMIT, 4, {}),
    ],
)
def test_the_file_is_that_of_the_unsharded_model(
    kind: str, plan: str, hashing: Any, world_size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    case = in_kinds(case_of(plan, hashing, world_size=world_size))[kind]
    reports = ranks(world_size).run(exported, case, trained_alone(case).state_dict(), tmp_path / "sharded.pt", options)
    whole = trained_alone(case)
    expected = recfx.export(whole, tmp_path / "whole.pt", sample_of(case), **options)
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["sharded.pt", "whole.pt"]
    assert all(report == reports[0] for report in reports)
    assert (reports[0].tables, reports[0].graph) == (expected.tables, expected.graph)
    assert reports[0].bytes == (tmp_path / "sharded.pt").stat().st_size
    assert_same_file(tmp_path / "sharded.pt", tmp_path / "whole.pt")
    for seed in range(2):
        assert_same_answers(tmp_path, sample_of(case, seed))


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_what_is_rounded_between_ranks_is_not_in_the_file(kind: str, tmp_path: Path) -> None:
    case = replace(in_kinds(case_of("mixed", LRU))[kind], wire=("bf16", "bf16"))
    ranks(2).run(exported, case, trained_alone(case).state_dict(), tmp_path / "sharded.pt", {})
    recfx.export(trained_alone(case), tmp_path / "whole.pt", sample_of(case))
    assert_same_answers(tmp_path, sample_of(case, 1))


def assert_same_answers(folder: Path, sample: KeyedJaggedTensor) -> None:
    """The file of the sharded model answers as that of the whole one."""
    loaded, expected = (recfx.load(folder / name) for name in ("sharded.pt", "whole.pt"))
    for output, answer in zip(loaded(sample), expected(sample), strict=True):
        assert torch.equal(output, answer)
        assert output.abs().sum() > 0


@pytest.mark.parametrize("seed", range(2))
def test_id_minus_one_may_belong_to_any_rank(seed: int, tmp_path: Path) -> None:
    """It is in no slot: the file has its row apart, counted from the first row of the table."""
    case = case_of("rows", replace(LRU, seed=seed))
    whole = make(case, 0)
    indexes = whole.sparse.hash_indexes
    for index in indexes.values():
        index.find_or_insert(torch.tensor([-1]))
    owners = {int(index.find(torch.tensor([-1]))) >= 40 for index in indexes.values()}
    assert owners == {seed == 0}
    ranks(2).run(exported, case, whole.state_dict(), tmp_path / "sharded.pt", {})
    sample = sample_of(case)
    asked = KeyedJaggedTensor(sample.keys(), torch.full_like(sample.values(), -1), lengths=sample.lengths())
    recfx.export(whole, tmp_path / "whole.pt", sample)
    assert_same_answers(tmp_path, asked)


@pytest.mark.parametrize("options", [{"format": "pt2", "quantize": "int8"}, {"portable": False}])
def test_other_files_answer_as_those_of_the_unsharded_model(options: dict[str, Any], tmp_path: Path) -> None:
    case = case_of("mixed", ADMIT)
    reports = ranks(2).run(exported, case, trained_alone(case).state_dict(), tmp_path / "sharded.pt", options)
    expected = recfx.export(trained_alone(case), tmp_path / "whole.pt", sample_of(case), **options)
    assert reports[0] == reports[1]
    assert (reports[0].format, reports[0].tables) == (expected.format, expected.tables)
    assert_same_answers(tmp_path, sample_of(case, 1))


def in_model_parallel(rank: int, world_size: int, case: Case, path: Path) -> ExportReport:
    standard, width = build(case)
    model = Model(with_optimizer(case, recfx.convert(standard, hashing=case.hashing)), width)
    plan = ShardingPlan({"sparse": plan_of(case, model.sparse, world_size)})  # type: ignore[dict-item]
    parallel = DistributedModelParallel(model, plan=plan, sharders=recfx.sharders())
    for step in batches(case, world_size, 2):
        parallel(step[rank])[0].backward()
    report = recfx.export(parallel, path, sample_of(case))
    parallel.eval()
    expected = parallel(sample_of(case))
    for output, answer in zip(recfx.load(path)(sample_of(case)), expected, strict=True):
        torch.testing.assert_close(output, answer, rtol=1e-5, atol=1e-6)
    return report


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_inside_distributed_model_parallel_after_training_on_all_ranks(kind: str, tmp_path: Path) -> None:
    reports = ranks(2).run(in_model_parallel, in_kinds(case_of("mixed", LRU))[kind], tmp_path / "model.pt")
    assert reports[0] == reports[1]
    assert sum(table.ids for table in reports[0].tables) > 50


def replicas_inside(rank: int, world_size: int, case: Case, before: State, path: Path) -> None:
    model: Any = sharded(case, before, world_size)
    model.over = nn.parallel.DistributedDataParallel(model.over)
    recfx.export(model, path, sample_of(case))
    assert type(model.over) is nn.parallel.DistributedDataParallel


def test_replicas_of_parts_of_the_model(tmp_path: Path) -> None:
    case = case_of("tables", LRU)
    ranks(2).run(replicas_inside, case, trained_alone(case).state_dict(), tmp_path / "sharded.pt")
    recfx.export(trained_alone(case), tmp_path / "whole.pt", sample_of(case))
    assert_same_answers(tmp_path, sample_of(case))


def with_deltas(rank: int, world_size: int, case: Case, before: State, folder: Path) -> list[tuple[int, int]]:
    """A base, two deltas after steps of all ranks, and a whole file; the second base is read from the files."""
    model, sample = sharded(case, before, world_size), sample_of(case)
    recfx.track_changes(model)
    recfx.export(model, folder / "base", sample)
    reports = []
    for number, last in enumerate(["base", "1"], 1):
        train(model, case, rank, world_size, 2 * number, 2 * number + 2)
        reports.append(recfx.export_delta(model, folder / f"{number}", base=folder / last))
        if number == 1:
            tracked._REMEMBERED.clear()
    recfx.export(model, folder / "whole.pt", sample)
    return [(report.number, sum(table.rows for table in report.tables)) for report in reports]


@pytest.mark.parametrize(("kind", "hashing", "world_size"), [("pooled", LRU, 2), ("sequence", ADMIT, 2)])
def test_deltas_are_those_of_the_whole_model(kind: str, hashing: Any, world_size: int, tmp_path: Path) -> None:
    case = in_kinds(case_of("mixed", hashing, world_size=world_size))[kind]
    of_ranks = ranks(world_size).run(with_deltas, case, trained_alone(case).state_dict(), tmp_path)
    assert all(report == of_ranks[0] for report in of_ranks)
    assert all(rows > 0 for _, rows in of_ranks[0])
    recfx.merge_deltas(tmp_path / "base", [tmp_path / "1", tmp_path / "2"], tmp_path / "sharded.pt")
    assert_same_file(tmp_path / "sharded.pt", tmp_path / "whole.pt")
    assert_same_answers(tmp_path, sample_of(case, 1))


# Errors


def fails(rank: int, world_size: int, case: Case, before: State, path: Path, fault: str) -> str:
    """What export raises on this rank, after which it works."""
    model = sharded(case, before, world_size)
    sample: Any = sample_of(case)
    options: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        if fault == "quantize":
            options = {"quantize": "int3"}
        elif fault == "other quantize" and rank == 1:
            options = {"quantize": "int8"}
        elif fault == "format" and rank == 1:
            options = {"format": "onnx"}
        elif fault == "checkpoint" and rank == 1:
            options = {"checkpoint": path.parent}
        elif fault == "sample" and rank == 0:
            sample = torch.zeros(2)
        elif fault == "directory":
            path = path / "nowhere" / "model.pt"
        elif fault == "disk":
            patch.setattr(served_collection, "reserve", _full)
        elif fault == "index" and rank == 1:
            next(iter(model.sparse.hash_indexes.values())).row_state.fill_(7)  # type: ignore[union-attr, operator]
        with pytest.raises(recfx.RecfxError) as raised:
            recfx.export(model, path, sample, **options)
    if fault != "index":
        recfx.export(
            model, path.parent / "other.pt" if fault != "directory" else path.parents[1] / "other.pt", sample_of(case)
        )
    return raised.value.reason


def _full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("quantize", "invalid_argument"),
        ("other quantize", "ranks_differ"),
        ("format", "invalid_argument"),
        ("checkpoint", "model_is_sharded"),
        ("sample", "sample_failed"),
        ("directory", "cannot_write"),
        ("disk", "cannot_write"),
        ("index", "torn_state"),
    ],
)
def test_an_error_on_one_rank_is_one_on_all_and_the_old_file_stays(fault: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("old")
    path = tmp_path if fault == "directory" else tmp_path / "model.pt"
    case = case_of("rows", LRU)
    errors = ranks(2).run(fails, case, trained_alone(case).state_dict(), path, fault)
    assert errors == [reason, reason]
    assert (tmp_path / "model.pt").read_text() == "old"
    assert {file.name for file in tmp_path.iterdir()} <= {"model.pt", "other.pt"}


def refused(rank: int, world_size: int, path: Path) -> list[str]:
    case, reasons = case_of("tables", None), []
    standard, width = build(case)
    by_torchrec = DistributedModelParallel(Model(standard, width))
    model: Any = nn.ModuleList([make(case, world_size)])
    group = dist.new_group([0, 1])
    model.append(make(case, world_size, group=group))
    for wrong in (by_torchrec, model):
        with pytest.raises(recfx.ExportError) as raised:
            recfx.export(wrong, path, sample_of(case))
        reasons.append(raised.value.reason)
    return reasons


def test_what_cannot_be_exported_from_all_ranks(tmp_path: Path) -> None:
    reasons = ranks(2).run(refused, tmp_path / "model.pt")
    assert reasons == [["model_is_sharded", "several_process_groups"]] * 2
    assert list(tmp_path.iterdir()) == []
