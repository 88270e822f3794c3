"""Stored files, in groups: the ``.txt`` of a group is its files, compressed, as text; the ``.json`` says what they are.

Files that one version of recfx wrote with one version of torch share most of their code, so they are compressed as one.
"""

import base64
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torchrec import KeyedJaggedTensor

from tests.files.models import CALLS, call

DATA = Path(__file__).parent / "data"
COLUMNS = 120

Facts = dict[str, Any]
"""``kind``, ``version`` of the format, ``torch`` that wrote the file, and what it answered then."""


def groups() -> list[str]:
    return sorted(path.stem for path in DATA.glob("*.json"))


@cache
def facts_in(group: str) -> Mapping[str, Facts]:
    """What is known of each file in a group, by its name there."""
    return json.loads((DATA / f"{group}.json").read_text())


def facts_of(name: str) -> Facts:
    """What is known of a file, whose name is ``<group>/<name in the group>``."""
    group, _, of_file = name.partition("/")
    return facts_in(group)[of_file]


def names(*kinds: str) -> list[str]:
    return [
        f"{group}/{name}" for group in groups() for name, facts in facts_in(group).items() if facts["kind"] in kinds
    ]


def unpack(name: str, folder: Path) -> Path:
    """Write a stored file, or directory, into a folder, and return its path."""
    group, _, of_file = name.partition("/")
    content = lzma.decompress(base64.b85decode((DATA / f"{group}.txt").read_text().replace("\n", "")))
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = [info for info in archive.getmembers() if info.name.partition("/")[0] == of_file]
        archive.extractall(folder, members, filter="data")
    return folder / of_file


def store(group: str, folder: Path, facts: Mapping[str, Facts]) -> None:
    """Store files and directories of a folder, without what would say who wrote them, when and where."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in facts:
            if zipfile.is_zipfile(folder / name):
                _without_debug_records(folder / name)
            archive.add(folder / name, name, filter=_without_owner)
    text = base64.b85encode(lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME)).decode()
    DATA.mkdir(exist_ok=True)
    lines = [text[at : at + COLUMNS] for at in range(0, len(text), COLUMNS)]
    (DATA / f"{group}.txt").write_text("\n".join(lines) + "\n")
    described = ",\n".join(f"{json.dumps(name)}: {json.dumps(known)}" for name, known in facts.items())
    (DATA / f"{group}.json").write_text(f"{{\n{described}\n}}\n")


def _without_debug_records(path: Path) -> None:
    """Leave out where the sources were on the machine that wrote the file, and compress its records with the others."""
    records = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(records) as old, zipfile.ZipFile(path, "w") as new:
        for name in sorted(old.namelist()):
            if not name.endswith(".debug_pkl"):
                new.writestr(zipfile.ZipInfo(name), old.read(name))


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    return info.replace(mtime=0, uid=0, gid=0, uname="", gname="", mode=0o755 if info.isdir() else 0o644)


def answers(model: Any) -> list[dict[str, Any]]:
    """Calls of a model, and what it answers."""
    described = []
    for seed, (size, low, high) in enumerate(CALLS, start=9):
        dense, features = call(size, seed, low, high)
        with torch.no_grad():
            output = model(dense, features)
        inputs = {"dense": dense.view(-1), "ids": features.values(), "lengths": features.lengths(), "output": output}
        described.append({"keys": features.keys()} | {name: value.tolist() for name, value in inputs.items()})
    return described


def calls_of(answered: list[dict[str, Any]]) -> list[tuple[tuple[torch.Tensor, KeyedJaggedTensor], torch.Tensor]]:
    """The calls of ``answers``, with the output that each has to have."""
    calls = []
    for described_call in answered:
        dense, output = (torch.tensor(described_call[name]) for name in ("dense", "output"))
        ids, lengths = (torch.tensor(described_call[name], dtype=torch.int64) for name in ("ids", "lengths"))
        features = KeyedJaggedTensor(described_call["keys"], ids, lengths=lengths)
        calls.append(((dense.view(-1, 1), features), output.view(-1, 2)))
    return calls
