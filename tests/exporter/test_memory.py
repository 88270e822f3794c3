"""An export takes memory for a piece, not for a table: measured in processes of their own, which run this file."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from tests.builders.collections import tables_named
from tests.support.forked_script import run_script

MEGABYTES = 300
MOST = {("adopted", "none"): 0.4, ("hashed", "none"): 0.4, ("hashed", "int8"): 0.65}
"""The most memory beside the model, as a share of its size. Measured were 0.03, 0.1, and 0.41 to 0.56, because the
allocator keeps some of what quantizing pieces and an index's slots took. A copy of a table would be 0.5 more."""

DIM, KEYS = 64, ["f0", "f1"]


def features(ids: torch.Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, ids.repeat(2), lengths=torch.ones(2 * ids.numel(), dtype=torch.int64))


def build(rows: int, kind: str) -> nn.Module:
    hashing = recfx.HashConfig(dense_rows=0) if kind == "hashed" else recfx.HashConfig()
    model = recfx.convert(tables_named(*KEYS, rows=rows, dim=DIM), hashing=hashing)
    if kind == "hashed":
        model.train()(features(torch.randperm(rows // 2) * 2**20))
    return model.eval()


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Watched:
    """The most anonymous memory that the process has meanwhile; the system may take back that of a file."""

    def __enter__(self) -> Watched:
        self.most, self._stops = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stops.wait(0.002):
            self.most = max(self.most, memory("RssAnon"))

    def __exit__(self, *_: object) -> None:
        self._stops.set()
        self._thread.join()


def share(*arguments: object) -> tuple[float, str]:
    """Which part of the model's size an export took more, and what it showed."""
    done = run_script(Path(__file__), *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(("kind", "quantize"), MOST)
def test_no_table_is_copied(kind: str, quantize: str, tmp_path: Path) -> None:
    taken, shown = share(tmp_path / "model.pt", MEGABYTES, kind, quantize)
    assert taken < MOST[kind, quantize]
    assert "export:" not in shown  # no bar, because there is no terminal
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def main(path: str, megabytes: str, kind: str, quantize: str) -> None:
    """Export a big model, and print how much memory that took beyond the model, as a share of its size."""
    options: dict[str, Any] = {} if quantize == "none" else {"quantize": quantize}
    size = int(megabytes) * 2**20
    model = build(size // (4 * DIM * len(KEYS)), kind)
    sample = features(torch.arange(8))
    recfx.export(build(64, kind), path, sample, **options)  # loads what an export needs
    before = memory("RssAnon")
    with Watched() as watched:
        recfx.export(model, path, sample, **options)
    print((watched.most - before) / size)


if __name__ == "__main__":
    main(*sys.argv[1:])
