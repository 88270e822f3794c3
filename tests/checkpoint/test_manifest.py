"""``checkpoint.json``: what it must be to be believed, and whose it is when it is damaged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import recfx
from recfx.checkpoint.manifest import Manifest, is_foreign
from tests.checkpoint.crafted import reseal

MANIFEST = Manifest("data-0123456789abcdef", {"__0_0.distcp": (12, "a" * 64)})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    MANIFEST.switch(tmp_path, "checkpoint.json.0123456789abcdef")
    return tmp_path


def refused(directory: Path) -> str:
    with pytest.raises(recfx.CheckpointError) as caught:
        Manifest.read(directory)
    return caught.value.reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": 1}, "checkpoint_version"),
        ({"version": 4}, "checkpoint_version"),
        ({"files": []}, "checkpoint_torn"),
    ],
)
def test_another_manifest(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    Manifest("data-0123456789abcdef", {}).switch(tmp_path, "new")
    if "files" not in changed:
        reseal(tmp_path, **changed)
    else:
        line = json.dumps({"format": "recfx", "version": 3, "data": "data-0123456789abcdef", **changed}).encode()
        digest = hashlib.sha256(line).hexdigest().encode()
        (tmp_path / "checkpoint.json").write_bytes(line + b"\n" + digest + b"\n")
    assert refused(tmp_path) == reason


def test_whose_it_is(directory: Path) -> None:
    """However little of it is left, one of recfx's is written over, and one of somebody else is not."""
    path = directory / "checkpoint.json"
    content = path.read_bytes()
    ours = [content, content[:5], content[:1], b"", bytes(100), content[:30] + bytes(50), content[40:], b"??" + content]
    theirs = [b"x", b'{"step": 5}', b"\0x\0", b"[]", b'{"data": "mine"}', b'{"format": "other"}']
    for content, foreign in [*((text, False) for text in ours), *((text, True) for text in theirs)]:
        path.write_bytes(content)
        assert is_foreign(directory) == foreign, content
    path.unlink()
    assert not is_foreign(directory)
