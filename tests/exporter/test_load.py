"""Loading files while others take their place, and where the host lacks something."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.exporter import loaded_program
from tests.exporter.changed_records import Records, forge
from tests.exporter.hashed_models import call, trained
from tests.files.stored import unpack

BATCH = call(3, seed=1)


@pytest.fixture(scope="module", params=["torchscript", "pt2"])
def versions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of a model, in files whose manifests differ as well."""
    folder, model = tmp_path_factory.mktemp("versions"), trained()
    paths = [folder / f"{number}.model" for number in range(2)]
    for path in paths:
        recfx.export(model, path, call(6), format=request.param)
        model.linear.weight.data.mul_(2)
    return paths


@contextmanager
def replaced_all_the_time(path: Path, versions: list[Path]) -> Iterator[None]:
    """A thread puts one version after the other in the place of a file, as an export does."""
    stops = threading.Event()

    def replace() -> None:
        number = 0
        while not stops.wait(0.0005):
            number += 1
            replacement = path.with_name(f"{number}.next")
            os.link(versions[number % 2], replacement)
            os.replace(replacement, path)

    os.link(versions[0], path)
    thread = threading.Thread(target=replace)
    thread.start()
    try:
        yield
    finally:
        stops.set()
        thread.join(60)
        assert not thread.is_alive()


def test_a_file_that_is_replaced_while_it_is_loaded_is_one_of_both(versions: list[Path], tmp_path: Path) -> None:
    answers = {}
    for version in versions:
        loaded = recfx.load(version)
        answers[loaded.manifest["content_crc32"]] = loaded(*BATCH.args)
    seen = set()
    with replaced_all_the_time(tmp_path / "model", versions):
        for _ in range(10):
            loaded = recfx.load(tmp_path / "model")
            seen.add(loaded.manifest["content_crc32"])
            assert torch.equal(loaded(*BATCH.args), answers[loaded.manifest["content_crc32"]])
    assert len(seen) == 2


def refused(path: Path, reason: str, **options: Any) -> recfx.ExportError:
    with pytest.raises(recfx.ExportError) as raised:
        recfx.load(path, **options)
    assert raised.value.reason == reason, raised.value
    return raised.value


# What a host may lack


def test_a_torch_with_other_archives(
    exported: dict[str, Path], model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_program, "pt2_reader", lambda: None)
    for refused in (
        lambda: recfx.load(exported["pt2"]),
        lambda: recfx.export(model, tmp_path / "m.pt2", call(6), format="pt2"),
    ):
        with pytest.raises(recfx.ExportError, match="torch") as raised:
            refused()
        assert raised.value.reason == "no_pt2"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (7, "device_unavailable"),
        (-1, "device_unavailable"),
        (10**30, "device_unavailable"),
        ("npu:0", "device_unavailable"),
        (torch.device("cuda"), "device_unavailable"),
        ("cpu:x", "device_unavailable"),
        ("", "device_unavailable"),
        (True, "invalid_argument"),
        (1.5, "invalid_argument"),
        ([], "invalid_argument"),
        ("meta", "invalid_argument"),
    ],
)
@pytest.mark.parametrize("target", ["cpu", "npu"])
def test_a_device_that_is_not_here(device: Any, reason: str, target: str, exported: dict[str, Path]) -> None:
    assert "device" in refused(exported[target], reason, device=device).message


@pytest.fixture(scope="module")
def exported(model: nn.Module, file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model's file for the CPU, one for other devices, and one of a program of ``torch.export``."""
    folder = tmp_path_factory.mktemp("targets")
    recfx.export(model, folder / "npu", call(6), device="npu")
    recfx.export(model, folder / "pt2", call(6), format="pt2")
    return {"cpu": file, "npu": folder / "npu", "pt2": folder / "pt2"}


# What is in a file


def test_a_whole_file_that_torch_does_not_understand(exported: dict[str, Path], tmp_path: Path) -> None:
    """As another version of torch might write it."""

    def change(records: Records) -> Records:
        return {
            name: was.replace(b"def named", b"def named named") if name.endswith(".py") else was
            for name, was in records.items()
        }

    forge(exported["cpu"], tmp_path / "model", change)
    error = refused(tmp_path / "model", "cannot_load")
    assert torch.__version__ in error.message
    assert recfx.load(exported["cpu"]).manifest["torch_version"] in error.what_to_do


def test_a_file_of_format_1_is_refused(tmp_path: Path) -> None:
    refused(unpack("format_1_torch_2.13/torchscript", tmp_path), "older_format")
