"""What load_checkpoint refuses, and that the model, its indexes and its optimizers are as they were then."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.checkpoint.directory import Manifest
from tests.builders.optimizers import attach
from tests.checkpoint.crafted import refused, reseal
from tests.checkpoint.training import RAW, OnePart, Training, TwoPart, assert_same
from tests.support.refusals import refused as refusing


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    training = Training.build("adam", rows=40, model_class=OnePart)
    training.steps(0, 2)
    training.save(directory)
    return directory


def other(**arguments: Any) -> Training:
    """Another training, which holds other ids and has made other steps."""
    training = Training.build(**{"kind": "adam", "rows": 40, "seed": 3, "model_class": OnePart, **arguments})
    training.steps(5, 6)
    return training


def damage_files(directory: Path) -> list[tuple[Path, bytes]]:
    """Every way in which one file is truncated, or has one byte flipped."""
    damages = []
    for path in [directory / "checkpoint.json", *sorted((directory / Manifest.read(directory).data).iterdir())]:
        content = path.read_bytes()
        size = len(content)
        damages += [(path, content[:length]) for length in (0, 1, size // 2, size - 1)]
        step = 1 if path.name == "checkpoint.json" else size // 60
        for position in [*range(0, size, step), size - 1]:
            flipped = bytearray(content)
            flipped[position] ^= 1 << (5 if position % 2 else 0)
            damages.append((path, bytes(flipped)))
        damages.append((path, content + b"\0"))
    return damages


def test_a_damaged_file_is_noticed_and_nothing_is_loaded(saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(saved, directory)
    training = other()
    before = training.everything()
    damages = damage_files(directory)
    for path, content in damages:
        intact = path.read_bytes()
        path.write_bytes(content)
        with refusing("checkpoint_torn", error=recfx.CheckpointError) as caught:
            training.load(directory)
        assert str(path) in str(caught.value)
        path.write_bytes(intact)
    assert_same(training.everything(), before)
    assert len(damages) > 500
    training.load(directory)


def test_a_missing_file_is_noticed(saved: Path, tmp_path: Path) -> None:
    data = Manifest.read(saved).data
    for name in os.listdir(saved / data):
        directory = tmp_path / name
        shutil.copytree(saved, directory)
        (directory / data / name).unlink()
        error = refused(other(), directory)
        assert error.reason == "checkpoint_torn"
        assert "missing" in error.message


@pytest.mark.parametrize("place", ["nowhere", "file", "empty", "unfinished", "dcp"])
def test_there_is_no_checkpoint(saved: Path, tmp_path: Path, place: str) -> None:
    directory = tmp_path / "d"
    if place == "file":
        directory.write_text("a model")
    if place == "dcp":
        torch.distributed.checkpoint.save({"weight": torch.zeros(2)}, checkpoint_id=directory, no_dist=True)
    if place == "empty":
        directory.mkdir()
    if place == "unfinished":
        shutil.copytree(saved, directory)
        (directory / "checkpoint.json").unlink()
    error = refused(other(), directory)
    assert error.reason == "checkpoint_missing"
    assert directory.exists() == (place != "nowhere")


@pytest.mark.parametrize("version", [1, 4])
def test_a_version_that_is_not_read(saved: Path, tmp_path: Path, version: int) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "d"))
    reseal(directory, version=version)
    assert refused(other(), directory).reason == "checkpoint_version"


def with_constant(*size: int, dtype: torch.dtype = torch.float32) -> type[nn.Module]:
    class With(OnePart):
        def __init__(self, rows: int) -> None:
            super().__init__(rows)
            self.register_buffer("constant", torch.zeros(size, dtype=dtype))

    return With


@pytest.mark.parametrize(
    ("source", "target", "name"),
    [
        (OnePart, with_constant(3), "constant"),
        (with_constant(3), OnePart, "constant"),
        (OnePart, TwoPart, "first.embedding_bags.b.weight"),
        (with_constant(3), with_constant(2), "constant"),
        (with_constant(3), with_constant(3, dtype=torch.float16), "constant"),
    ],
)
def test_another_model_is_named(tmp_path: Path, source: Any, target: Any, name: str) -> None:
    other(model_class=source).save(tmp_path)
    error = refused(other(model_class=target), tmp_path)
    assert error.reason == "checkpoint_mismatch"
    assert name in error.message


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"hashing": recfx.HashConfig(dense_rows=0, buckets=4, seed=1)}, "wrong_seed"),
        ({"hashing": recfx.HashConfig(dense_rows=0, buckets=8)}, "wrong_bucket"),
        ({"hashing": recfx.HashConfig(dense_rows=20, buckets=4)}, "dense_rows_mismatch"),
        ({"rows": 80, "hashing": recfx.HashConfig(dense_rows=20, buckets=4)}, "dense_rows_mismatch"),
        ({"hashing": recfx.HashConfig()}, "checkpoint_mismatch"),
        ({"rows": 39}, "rows_mismatch"),
        ({"rows": 44, "hashing": recfx.HashConfig(dense_rows=0, buckets=40)}, "bucket_too_small"),
    ],
)
def test_an_index_of_another_table(saved: Path, target: dict[str, Any], reason: str) -> None:
    training = Training.build(**{"kind": "adam", "rows": 40, "seed": 3, "model_class": OnePart, **target})
    error = refused(training, saved, optimizer=None)
    assert error.reason == reason


def swap(index: recfx.HashIndex) -> None:
    rows = torch.nonzero(index.row_state).squeeze(1)[[0, -1]]
    index.row_ids[rows] = index.row_ids[rows.flip(0)]
    index.written()  # or saving would say so already


def repeat(index: recfx.HashIndex) -> None:
    rows = torch.nonzero(index.row_state).squeeze(1)[:2]
    index.row_ids[rows[1]] = index.row_ids[rows[0]]
    index.written()


def unknown(index: recfx.HashIndex) -> None:
    index.row_state[3] = 77
    index.written()


@pytest.mark.parametrize(
    ("damage", "reason"), [(swap, "wrong_bucket"), (repeat, "duplicate_id"), (unknown, "torn_state")]
)
def test_a_damaged_index_under_right_checksums(
    tmp_path: Path, damage: Callable[[recfx.HashIndex], None], reason: str
) -> None:
    source = other(model_class=TwoPart)
    damage(source.model.second.index("c"))
    source.save(tmp_path)
    error = refused(other(model_class=TwoPart), tmp_path)
    assert (error.reason, error.module_path) == (reason, "c")


@pytest.mark.parametrize("kind", ["adagrad", "sgd"])
def test_another_optimizer_in_backward(saved: Path, kind: str) -> None:
    training = other(kind=kind)
    error = refused(training, saved)
    assert (error.reason, error.module_path) == ("checkpoint_mismatch", "first.embedding_bags.a.weight")
    recfx.load_checkpoint(training.model, saved, in_backward=False)


def test_no_optimizer_in_backward_yet(saved: Path) -> None:
    torch.manual_seed(3)
    model = recfx.convert(OnePart(40), hashing=RAW)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        recfx.CheckpointError, match=r"has an optimizer in backward for first\.embedding_bags\.a\.weight"
    ):
        recfx.load_checkpoint(model, saved)
    assert_same(dict(model.state_dict()), before)
    recfx.load_checkpoint(model, saved, in_backward=False)
    assert len(model.first.index("a")) > 0
    attach([model.first.weight("a")], torch.optim.Adam)
    recfx.load_checkpoint(model, saved)
    assert float(model.first.fused_optimizers()["a"].state["step"]) == 2


def test_another_ordinary_optimizer(saved: Path, tmp_path: Path) -> None:
    training = other()
    dense = list(training.model.after.parameters())
    for wrong, path in ((torch.optim.Adagrad(dense), "after.weight"), (torch.optim.Adam(dense[:1]), "optimizer")):
        error = refused(training, saved, optimizer=wrong)
        assert (error.reason, error.module_path) == ("checkpoint_mismatch", path)
    assert refused(training, saved, optimizer=object()).reason == "optimizer_not_supported"
    recfx.save_checkpoint(training.model, tmp_path)
    assert "lacks an optimizer of " in refused(training, tmp_path).message


def test_an_ordinary_optimizer_with_its_parameters_in_another_order_and_in_more_groups(saved: Path) -> None:
    training, straight = other(), other()
    straight.load(saved)
    weight, bias = training.model.after.weight, training.model.after.bias
    training.optimizer = torch.optim.Adam([{"params": [bias]}, {"params": [weight]}], lr=0.5)
    training.load(saved)
    assert [group["lr"] for group in training.optimizer.param_groups] == [0.01, 0.01]
    for of_training in (training, straight):
        of_training.steps(0, 1)  # ids that the checkpoint knows
    assert_same(dict(training.model.state_dict()), dict(straight.model.state_dict()))


@pytest.mark.parametrize("call", [recfx.save_checkpoint, recfx.load_checkpoint])
@pytest.mark.parametrize(
    ("model", "directory", "message"),
    [
        (3, "d", "model is an int"),
        (nn.Linear(1, 1), 3, "directory is an int"),
        (nn.Linear(1, 1), "", "directory is ''"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, model: Any, directory: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with refusing("invalid_argument", match=message, error=recfx.CheckpointError):
        call(model, directory)
    assert os.listdir(tmp_path) == []


def test_tensors_that_are_not_simply_their_elements(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("odd", torch.eye(2).to_sparse())
    with refusing("value_not_supported", match=r"model\.odd is a tensor of dtype", error=recfx.CheckpointError):
        recfx.save_checkpoint(model, tmp_path)
    assert os.listdir(tmp_path) == []


def test_what_is_on_meta(saved: Path, tmp_path: Path) -> None:
    training = other()
    training.model.to("meta")
    for call in (training.save, training.load):
        with refusing("model_on_meta", error=recfx.CheckpointError):
            call(tmp_path if call == training.save else saved)
    assert os.listdir(tmp_path) == []


def test_a_setting_that_is_no_plain_data(tmp_path: Path) -> None:
    training = other()
    training.optimizer.param_groups[0]["note"] = Path("x")
    with refusing("value_not_supported", error=recfx.CheckpointError):
        training.save(tmp_path)
    assert os.listdir(tmp_path) == []


def test_an_index_on_one_side_only(saved: Path, tmp_path: Path) -> None:
    without = Training.build("adam", rows=40, hashing=recfx.HashConfig(), model_class=OnePart)
    without.save(tmp_path)
    for training, directory in ((without, saved), (other(), tmp_path)):
        error = refused(training, directory)
        assert error.reason == "checkpoint_mismatch"
        assert "first.hash_indexes.a.row_ids" in error.message
    with refusing("checkpoint_mismatch", match="hash_indexes", error=recfx.CheckpointError):
        recfx.load_checkpoint(OnePart(40), saved)


def test_an_optimizer_of_parameters_that_are_not_in_the_model(tmp_path: Path) -> None:
    training = other()
    optimizer = torch.optim.Adam([*training.model.after.parameters(), nn.Parameter(torch.zeros(2))])
    with refusing("optimizer_not_supported", match="its number 2", error=recfx.CheckpointError):
        recfx.save_checkpoint(training.model, tmp_path / "d", optimizer=optimizer)
    assert not (tmp_path / "d").exists()
