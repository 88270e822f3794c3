"""Checkpoints, exported without the process that trained: the file is that of the model that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.commandline.main import main
from recfx.exporter import buffers
from tests.exporter.conftest import UsualExport
from tests.exporter.hashed_models import assert_same_file, call
from tests.support.forked_script import run_module
from tests.support.needs import NEEDS_PT2

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
        ("built", ["--quantize", "int8"]),
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
    monkeypatch.setattr(buffers, "PIECE_BYTES", 256)
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


@pytest.mark.parametrize("options", [pytest.param(["--format", "pt2"], marks=NEEDS_PT2), ["--not-portable"]])
def test_other_files(options: list[str], model: nn.Module, directory: Path, tmp_path: Path) -> None:
    path, sample = tmp_path / "m.pt", call(5, seed=9)
    assert main(["export", f"{FACTORIES}:built", str(path), "--checkpoint", str(directory), *options]) == 0
    assert torch.allclose(recfx.load(path)(*sample.args), model(*sample.args), rtol=1e-5, atol=1e-6)


def test_a_model_that_is_not_the_saved_one(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pt"
    path.write_text("old")
    assert main(["export", f"{FACTORIES}:not_converted", str(path), "--checkpoint", str(directory)]) == 1
    shown = capsys.readouterr()
    assert "[checkpoint_mismatch]" in shown.err
    assert not shown.out
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", f"{FACTORIES}:model"], "FILE"),
        (["export", f"{FACTORIES}:without_sample", "m.pt"], "returns no sample"),
        (
            ["export", f"{FACTORIES}:model", "m.pt", "--quantize", "int8", "--quantize", "mean=int4"],
            "one format for all",
        ),
        (
            ["export", f"{FACTORIES}:model", "m.pt", "--quantize", "mean=int8", "--quantize", "mean=int4"],
            "once for each of some",
        ),
        (
            ["export", "./tests/exporter/absent.py:model", "m.pt"],
            "there is no Python file './tests/exporter/absent.py'",
        ),
        (["export", "tests.exporter.hashed_models:call", "m.pt"], "raises TypeError"),
        (["export", "tests.exporter.absent:model", "m.pt"], "raises ModuleNotFoundError"),
    ],
)
def test_usage_errors_are_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_as_a_process(directory: Path, tmp_path: Path) -> None:
    command = ["export", f"{FACTORIES}:built", str(tmp_path / "m.pt")]
    done = run_module("recfx", *command, "--checkpoint", str(directory), "--quantize", "int3")
    assert done.returncode == 1
    assert "[invalid_argument] quantize='int3'" in done.stderr
    assert "Traceback" not in done.stderr
