"""Files that earlier versions wrote, as this repository keeps them: compressed, as text, with the answers beside.

``python -m tests.exporter.committed_files`` writes the file of the current format; once one is committed, it never
changes.
"""

from __future__ import annotations

import base64
import io
import json
import lzma
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torchrec import KeyedJaggedTensor

import recfx
from recfx.exporter.manifest import FORMAT_VERSION
from tests.exporter.hashed_models import call, trained

DATA = Path(__file__).parent / "data"
QUANTIZE = {"mean": "int8", "shared_by_two": "int4", "some_dense": "fp16"}
COLUMNS = 120


def committed_versions() -> list[int]:
    """The formats of which there is a file."""
    return sorted(int(path.stem.removeprefix("format_")) for path in DATA.glob("format_*.json"))


def committed_file(version: int, path: Path) -> list[tuple[tuple[Any, ...], torch.Tensor]]:
    """Unpack the file of a format to ``path``, and return calls of it with the answers that it gave when written."""
    text = (DATA / f"format_{version}.txt").read_text()
    path.write_bytes(lzma.decompress(base64.b85decode(text.replace("\n", ""))))
    calls = json.loads((DATA / f"format_{version}.json").read_text())
    return [(_arguments(call), torch.tensor(call["output"]).view(-1, 2)) for call in calls]


def write_committed_file() -> Path:
    """Write the file of the current format, and its answers."""
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.pt"
        recfx.export(trained(), path, call(6), quantize=QUANTIZE)
        _drop_debug_records(path)
        text = base64.b85encode(lzma.compress(path.read_bytes(), preset=9)).decode()
        loaded = recfx.load(path)
        calls = [_described(call(size, seed=9, low=low, high=high), loaded) for size, low, high in CALLS]
    target = DATA / f"format_{FORMAT_VERSION}.txt"
    target.write_text("\n".join(text[at : at + COLUMNS] for at in range(0, len(text), COLUMNS)) + "\n")
    target.with_suffix(".json").write_text(json.dumps(calls, indent=1) + "\n")
    return target


def _drop_debug_records(path: Path) -> None:
    """Leave out where the sources were on the machine that wrote the file, which nothing needs."""
    content = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(content) as whole, zipfile.ZipFile(path, "w") as rest:
        for info in whole.infolist():
            if not info.filename.endswith(".debug_pkl"):
                rest.writestr(info, whole.read(info))


CALLS = ((5, -20, 20), (3, -(2**63), 2**63 - 1), (1, 0, 20), (0, 0, 1))


def _described(sample: recfx.Sample, loaded: recfx.LoadedModel) -> dict[str, Any]:
    dense, features = sample.args
    return {
        "dense": dense.tolist(),
        "keys": features.keys(),
        "ids": features.values().tolist(),
        "lengths": features.lengths().tolist(),
        "output": loaded(dense, features).tolist(),
    }


def _arguments(described: dict[str, Any]) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    dense = torch.tensor(described["dense"]).view(-1, 1)
    ids, lengths = (torch.tensor(described[name], dtype=torch.int64) for name in ("ids", "lengths"))
    return dense, KeyedJaggedTensor(described["keys"], ids, lengths=lengths)


if __name__ == "__main__":
    sys.stdout.write(f"{write_committed_file()}\n")
