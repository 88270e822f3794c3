"""Files that earlier versions wrote are loaded, and answer as they did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import recfx
from recfx.exporter.manifest import FORMAT_VERSION
from tests.exporter.committed_files import DATA, committed_file, committed_versions


def test_there_is_a_file_of_every_format() -> None:
    assert committed_versions() == list(range(1, FORMAT_VERSION + 1))
    assert all(path.stat().st_size < 150_000 for path in DATA.iterdir())


@pytest.mark.parametrize("version", committed_versions())
def test_a_committed_file_is_loaded_and_answers_as_it_did(version: int, tmp_path: Path) -> None:
    calls = committed_file(version, tmp_path / "model.pt")
    loaded = recfx.load(tmp_path / "model.pt")
    assert len(calls) >= 4
    for arguments, answer in calls:
        torch.testing.assert_close(loaded(*arguments), answer, rtol=1e-5, atol=1e-6)
    (dense, features), answer = calls[0]
    inputs = {"dense": dense}
    for key, jagged in features.to_dict().items():
        inputs |= {f"features.{key}.values": jagged.values(), f"features.{key}.lengths": jagged.lengths()}
    torch.testing.assert_close(loaded.serve(inputs)["output"], answer, rtol=1e-5, atol=1e-6)
