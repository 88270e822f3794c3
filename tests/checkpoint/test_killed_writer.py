"""A writer that is killed at any moment leaves the old checkpoint or the new one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from recfx.checkpoint.manifest import Manifest
from tests.checkpoint import killed_writer
from tests.support.forked_script import run_script


def test_a_killed_writer_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    (tmp_path / "bystander").write_text("untouched")
    result = run_script(Path(killed_writer.__file__), str(directory))
    assert result.returncode == 0, result.stderr
    attempts = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    current = 0
    outcomes = set()
    for number, (attempt, status, version) in enumerate(attempts, start=1):
        assert attempt == number
        assert version in (current, attempt)
        outcomes.add((status, version == attempt))
        current = version
    assert outcomes == {(-signal.SIGKILL, False), (-signal.SIGKILL, True), (0, True)}
    assert len(attempts) > 100
    assert sorted(os.listdir(tmp_path)) == ["bystander", "checkpoint"]
    assert sorted(os.listdir(directory)) == ["checkpoint.json", Manifest.read(directory).data], "leftovers are cleaned"
