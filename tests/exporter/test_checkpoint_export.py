"""Checkpoints, exported without the process that trained: the file is that of the model that was saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import recfx
from recfx.commandline.main import main
from recfx.exporter import served_collection
from tests.exporter import factories
from tests.exporter.conftest import UsualExport
from tests.exporter.hashed_models import assert_same_file, call, trained
from tests.sharding.cases import Case, batches, concatenate
from tests.sharding.ranks import ranks
from tests.sharding.stateful import ADMIT, LRU, case_of, in_kinds, make, train
from tests.support.forked_script import run_module
from tests.support.needs import NEEDS_PT2
from tests.support.refusals import refused

FACTORIES = "tests.exporter.factories"


@pytest.fixture(scope="module")
def directory(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the model."""
    path = tmp_path_factory.mktemp("checkpoint")
    recfx.save_checkpoint(model, path)
    return path


@pytest.mark.parametrize(
    ("factory", "quantize"),
    [
        ("built", []),
        ("on_meta", []),
        ("on_meta", ["--quantize", "int8"]),
        ("built", ["--quantize", "mean=int4", "--quantize", "ebc.adopted=fp16"]),
    ],
)
def test_the_file_is_that_of_the_model_that_was_saved(
    usual_export: UsualExport,
    directory: Path,
    factory: str,
    quantize: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(served_collection, "PIECE_BYTES", 256)
    written = tmp_path / "found.pt"
    assert main(["export", f"{FACTORIES}:{factory}", str(written), "--checkpoint", str(directory), *quantize]) == 0
    chosen: Any = dict(flag.split("=") for flag in quantize[1::2]) if len(quantize) > 2 else (quantize or [None])[-1]
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{written}: torchscript, ")
    report = usual_export(False, chosen)
    assert rest == str(report).splitlines()[1:]
    assert_same_file(written, report.path)
    assert [file.name for file in tmp_path.iterdir()] == ["found.pt"]


def test_without_a_checkpoint(file: Path, tmp_path: Path) -> None:
    assert main(["export", f"{FACTORIES}:model", str(tmp_path / "found.pt")]) == 0
    assert_same_file(tmp_path / "found.pt", file)


@pytest.mark.parametrize("factory", ["not_converted", "called_by_name"])
def test_a_model_that_is_not_converted_stands_for_tables_without_an_index(factory: str, tmp_path: Path) -> None:
    plain, sample = getattr(factories, factory)()
    recfx.save_checkpoint(recfx.convert(plain), tmp_path / "checkpoint")
    arguments = ["export", f"{FACTORIES}:{factory}", str(tmp_path / "m.pt")]
    assert main([*arguments, "--checkpoint", str(tmp_path / "checkpoint")]) == 0
    assert torch.allclose(recfx.load(tmp_path / "m.pt")(*sample.args), plain(*sample.args), rtol=1e-5, atol=1e-6)


def saves(rank: int, world_size: int, case: Case, directory: Path) -> None:
    model = make(case, world_size)
    train(model, case, rank, world_size, 0, 3)
    recfx.save_checkpoint(model, directory)


@pytest.mark.parametrize(("hashing", "world_size"), [(LRU, 2), (ADMIT, 2), (None, 2), (LRU, 4)])
def test_saved_by_several_ranks(hashing: Any, world_size: int, tmp_path: Path) -> None:
    case = in_kinds(case_of("mixed", hashing, world_size=world_size))["mixed"]
    ranks(world_size).run(saves, case, tmp_path / "checkpoint")
    whole, sample = make(case, 0, seed=7), concatenate(batches(case, 3, 1)[0])
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    recfx.export(whole, tmp_path / "found.pt", sample, checkpoint=tmp_path / "checkpoint")
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    recfx.load_checkpoint(whole, tmp_path / "checkpoint")
    recfx.export(whole, tmp_path / "wanted.pt", sample)
    assert_same_file(tmp_path / "found.pt", tmp_path / "wanted.pt")


@pytest.mark.parametrize("options", [pytest.param(["--format", "pt2"], marks=NEEDS_PT2), ["--not-portable"]])
def test_other_files(options: list[str], model: nn.Module, directory: Path, tmp_path: Path) -> None:
    path, sample = tmp_path / "m.pt", call(5, seed=9)
    assert main(["export", f"{FACTORIES}:on_meta", str(path), "--checkpoint", str(directory), *options]) == 0
    assert torch.allclose(recfx.load(path)(*sample.args), model(*sample.args), rtol=1e-5, atol=1e-6)


# A part of the model that was saved


class WithLoss(nn.Module):
    """What is trained. The model that serves is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.ranker = factories.built()[0]
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *batch: Any) -> torch.Tensor:
        return (self.ranker(*batch) * self.scale).square().mean()


def with_loss(wrapped: str) -> Any:
    """Trained; in a wrapper, or with its part in two."""
    torch.manual_seed(0)
    model: Any = WithLoss()
    if wrapped == "parts":
        model.ranker = torch.compile(nn.parallel.DistributedDataParallel(model.ranker), backend="eager")
    elif wrapped == "DMP":
        model = DistributedModelParallel(model, device=torch.device("cpu"))
    elif wrapped == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    model(*call(6).args).backward()  # rows for some ids
    return model


def saves_with_loss(rank: int, world_size: int, wrapped: str, directory: Path) -> None:
    recfx.save_checkpoint(with_loss(wrapped), directory)


@pytest.mark.parametrize(("wrapped", "world_size"), [("", 1), ("DDP", 1), ("DMP", 1), ("DMP", 2), ("parts", 1)])
def test_the_model_inside_of_the_one_that_was_saved(
    wrapped: str, world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, path = tmp_path / "checkpoint", tmp_path / "m.pt"
    ranks(world_size).run(saves_with_loss, wrapped, directory)
    command = ["export", f"{FACTORIES}:on_meta", str(path), "--checkpoint", str(directory)]
    assert main(command) == 1
    told = capsys.readouterr().err
    assert "[checkpoint_mismatch]" in told
    assert "submodule='ranker'" in told
    assert main([*command, "--submodule", "ranker"]) == 0
    model, sample = factories.on_meta()
    recfx.export(model, tmp_path / "again.pt", sample, checkpoint=directory, submodule="ranker")
    recfx.export(with_loss("").ranker, tmp_path / "expected.pt", sample)
    assert_same_file(path, tmp_path / "expected.pt")
    assert_same_file(tmp_path / "again.pt", tmp_path / "expected.pt")


# Errors


def test_the_place_of_a_model_is_named(model: nn.Module, directory: Path, tmp_path: Path) -> None:
    """The part is loaded; a submodule that is not there; one of nothing."""
    recfx.save_checkpoint(WithLoss(), tmp_path / "whole")
    serving, sample = factories.built()
    recfx.save_checkpoint(nn.ModuleDict({"module": serving}), tmp_path / "module")  # as wrappers call what is inside
    with refused("checkpoint_mismatch", error=recfx.CheckpointError):
        recfx.load_checkpoint(serving, tmp_path / "module")
    recfx.export(serving, tmp_path / "m.pt", sample, checkpoint=tmp_path / "module", submodule="module")
    with refused("checkpoint_mismatch", "tower", error=recfx.CheckpointError) as caught:
        recfx.export(serving, tmp_path / "m.pt", sample, checkpoint=tmp_path / "whole", submodule="tower")
    assert "'ranker'" in caught.value.what_to_do
    with refused("invalid_argument", match="submodule='ranker'", error=recfx.ExportError):
        recfx.export(serving, tmp_path / "m.pt", sample, submodule="ranker")


@pytest.mark.parametrize(
    ("factory", "reason", "message"),
    [
        ("not_converted", "checkpoint_mismatch", "hash_indexes.shared_by_two"),
        ("with_buffer_on_meta", "checkpoint_mismatch", "lacks model.ebc"),
    ],
)
def test_a_model_that_is_not_the_saved_one(
    factory: str, reason: str, message: str, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    path.write_text("old")
    assert main(["export", f"{FACTORIES}:{factory}", str(path), "--checkpoint", str(directory)]) == 1
    shown = capsys.readouterr()
    assert f"[{reason}]" in shown.err
    assert message in shown.err
    assert not shown.out
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_a_tensor_on_meta_that_was_not_saved(tmp_path: Path) -> None:
    model, sample = factories.with_buffer_on_meta()
    saved = factories.WithBuffer().to_empty(device="cpu")
    saved.model.load_state_dict(trained().state_dict())
    recfx.save_checkpoint(saved, tmp_path / "checkpoint")
    with refused("model_on_meta", match="scale", error=recfx.CheckpointError):
        recfx.export(model, tmp_path / "model.pt", sample, checkpoint=tmp_path / "checkpoint")
    assert not (tmp_path / "model.pt").exists()


def test_rows_of_a_bigger_table_on_meta_are_initial_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the memory that they take has held before."""

    def built(rows: int, device: str) -> nn.Module:
        settings: Any = {"weight_init_min": 1.0, "weight_init_max": 2.0}
        table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"], **settings)
        collection = EmbeddingBagCollection(tables=[table], device=torch.device(device))
        return recfx.convert(collection, hashing=recfx.HashConfig.raw_ids(rows=rows, unseen="share"))

    def asked(first: int) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["f"], torch.arange(first, first + 6), lengths=torch.ones(6, dtype=torch.int64))

    small = built(8, "cpu")
    small(asked(100))
    recfx.save_checkpoint(small, tmp_path / "checkpoint")
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(77))
    sample = (asked(100),)
    recfx.export(built(64, "meta"), tmp_path / "m.pt", sample, checkpoint=tmp_path / "checkpoint")
    loaded = recfx.load(tmp_path / "m.pt")
    torch.testing.assert_close(loaded(*sample).values(), small.eval()(*sample).values(), rtol=0, atol=0)
    unknown = loaded(asked(10**9)).values()
    assert unknown.min() >= 1
    assert unknown.max() <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", f"{FACTORIES}:model"], "FILE"),
        (["plan", f"{FACTORIES}:model"], "FILE"),
        (
            ["export", f"{FACTORIES}:model", "m.pt", "--quantize", "int8", "--quantize", "mean=int4"],
            "one format for all",
        ),
        (
            ["export", f"{FACTORIES}:model", "m.pt", "--quantize", "mean=int8", "--quantize", "mean=int4"],
            "once for each of some",
        ),
    ],
)
def test_usage_errors_are_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_as_a_process(directory: Path, tmp_path: Path) -> None:
    command = ["export", f"{FACTORIES}:on_meta", str(tmp_path / "m.pt")]
    done = run_module("recfx", *command, "--checkpoint", str(directory), "--quantize", "int3")
    assert done.returncode == 1
    assert "[invalid_argument] quantize='int3'" in done.stderr
    assert "Traceback" not in done.stderr
