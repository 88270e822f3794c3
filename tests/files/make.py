"""``python -m tests.files.make [kind ...]`` stores files of the current formats, written with the installed torch.

Once a file is committed, it never changes.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import recfx
from recfx.checkpoint.directory import FORMAT_VERSION as CHECKPOINT_VERSION
from recfx.exporter.manifest import FORMAT_VERSION
from tests.files import models
from tests.files.stored import Facts, answers, store

EXPORTS: dict[str, dict[str, Any]] = {
    "torchscript": {},
    "own_operators": {"portable": False},
    "device": {"device": "npu"},
    "device_own_operators": {"device": "npu", "portable": False},
    "pt2": {"format": "pt2"},
}
INDEX_OPTIONS = {"dense_rows": 2, "buckets": 2, "on_full": "evict", "admit_after": 2}
INDEX_ROWS = 12
INDEX_VERSION = 4
"""A saved index had rows and their ids first; then also what was counted, an identity, and the counts of slices."""


def make(kind: str, path: Path) -> Facts:
    """Write a file of a kind to ``path``, and return what is to be known of it."""
    known: Facts = {"kind": kind, "torch": torch.__version__.partition("+")[0]}
    if kind == "index":
        return known | _make_index(path)
    model = models.trained(models.Mixed)
    if kind == "checkpoint":
        recfx.save_checkpoint(model, path)
        known |= {"version": CHECKPOINT_VERSION, "model": "Mixed", "calls": answers(model)}
        models.step(model, 5)
        return known | {"calls_after_a_step": answers(model)}
    quantize = dict.fromkeys(models.HASHING, "int8") if kind == "device_own_operators" else models.QUANTIZE
    recfx.export(model, path, models.call(6), quantize=quantize, **EXPORTS[kind])
    return known | {"version": FORMAT_VERSION, "calls": answers(recfx.load(path))}


def _make_index(path: Path) -> Facts:
    index = recfx.HashIndex(INDEX_ROWS, config=recfx.HashConfig(**INDEX_OPTIONS), name="table")
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        index.find_or_insert(torch.randint(-4, 4, (5,), generator=generator))
    torch.save(dict(index.state_dict()), path)
    ids = torch.arange(-5, 5)
    facts: dict[str, Any] = {
        "version": INDEX_VERSION,
        "options": INDEX_OPTIONS,
        "counters": index.counters,
        "ids": ids.tolist(),
    }
    facts["items"] = [part.tolist() for part in index.items()]
    facts["rows"] = index.find(ids).tolist()
    return facts | {"inserted": ids[::3].tolist(), "rows_after_inserting": index.find_or_insert(ids[::3]).tolist()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = {kind: make(kind, Path(folder) / kind) for kind in sys.argv[1:] or [*EXPORTS, "checkpoint", "index"]}
        store(f"format_{FORMAT_VERSION}_torch_{'.'.join(torch.__version__.split('.')[:2])}", Path(folder), made)
