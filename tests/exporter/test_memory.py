"""An export takes memory for a piece, not for a table: measured in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporter import memory_worker
from tests.support.forked_script import run_script

MEGABYTES = 300
MOST = {("adopted", "none"): 0.4, ("hashed", "none"): 0.4, ("hashed", "int8"): 0.65}
"""The most memory beside the model, as a share of its size. Measured were 0.03, 0.1, and 0.41 to 0.56, because the
allocator keeps some of what quantizing pieces and an index's slots took. A copy of a table would be 0.5 more."""


def share(*arguments: object) -> tuple[float, str]:
    """Which part of the model's size an export took more, and what it showed."""
    done = run_script(Path(memory_worker.__file__), *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(("kind", "quantize"), MOST)
def test_no_table_is_copied(kind: str, quantize: str, tmp_path: Path) -> None:
    taken, shown = share(tmp_path / "model.pt", MEGABYTES, kind, quantize)
    assert taken < MOST[kind, quantize]
    assert "export:" not in shown  # no bar, because there is no terminal
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
