"""Exports a big model, and prints how much memory that took beyond the model, as a share of its size.

Run as a process of its own: ``python -m tests.exporter.memory_worker PATH MEGABYTES KIND QUANTIZE``.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx

DIM, TABLES = 64, 2


class Model(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{n}", embedding_dim=DIM, num_embeddings=rows, feature_names=[f"f{n}"])
            for n in range(TABLES)
        ]
        self.sparse = EmbeddingBagCollection(tables=tables)
        self.over = nn.Linear(TABLES * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.over(self.sparse(features).values())
        return logits


def features(ids: torch.Tensor) -> KeyedJaggedTensor:
    keys = [f"f{n}" for n in range(TABLES)]
    return KeyedJaggedTensor(keys, ids.repeat(TABLES), lengths=torch.ones(TABLES * ids.numel(), dtype=torch.int64))


def build(rows: int, kind: str) -> nn.Module:
    hashing = recfx.HashConfig(dense_rows=0) if kind == "hashed" else recfx.HashConfig()
    model = recfx.convert(Model(rows), hashing=hashing)
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


def main(path: str, megabytes: str, kind: str, quantize: str) -> None:
    options: dict[str, Any] = {} if quantize == "none" else {"quantize": quantize}
    size = int(megabytes) * 2**20
    model = build(size // (4 * DIM * TABLES), kind)
    sample = features(torch.arange(8))
    recfx.export(build(64, kind), path, sample, **options)  # loads what an export needs
    before = memory("RssAnon")
    with Watched() as watched:
        recfx.export(model, path, sample, **options)
    print((watched.most - before) / size)


if __name__ == "__main__":
    main(*sys.argv[1:])
