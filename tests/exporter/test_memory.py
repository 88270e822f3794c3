"""An export takes memory for a piece, not for a table: measured in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MEGABYTES = 300
MOST = 0.3
"""Of the model's size, beyond the model itself; a copy of one of its two tables would be 0.5."""


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.exporter.memory_worker", *map(str, arguments)]
    pipe = subprocess.PIPE
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def share(process: subprocess.Popen[str]) -> tuple[float, str]:
    """Which part of the model's size an export took more, and what it showed."""
    out, shown = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    return float(out.splitlines()[-1]), shown


@pytest.mark.parametrize(("kind", "quantize"), [("adopted", "none"), ("hashed", "none"), ("hashed", "int8")])
def test_no_table_is_copied(kind: str, quantize: str, tmp_path: Path) -> None:
    taken, shown = share(start(tmp_path / "model.pt", MEGABYTES, kind, quantize))
    assert taken < MOST
    assert ("export: 100%" in shown) == (quantize == "none")  # the bar is for files of 256 MB and more
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_no_rank_holds_more_than_its_shards_and_an_index(tmp_path: Path) -> None:
    path, store = tmp_path / "model.pt", tmp_path / "store"
    ranks = [start(path, MEGABYTES, "hashed", "none", rank, 2, store) for rank in range(2)]
    assert all(taken < MOST for taken, _ in map(share, ranks))
    assert path.stat().st_size > MEGABYTES * 2**20
