import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recfx.kernels import library

FALLBACK_SCRIPT = """
import logging, sys, torch
from recfx.hashing import HashIndex
from recfx.kernels import library
index = HashIndex(10)
assert index.insert(torch.tensor([7, -1, 7]))[0].tolist() == [0, 1, 0]
assert index.find(torch.tensor([-1, 8])).tolist() == [1, -1]
assert not library.load() and library.why_not()
print(library.why_not())
"""


def test_loads_and_has_no_python_in_it() -> None:
    assert library.load(), library.why_not()
    assert library.why_not() == ""
    linked = subprocess.run(["ldd", str(library.build())], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in linked
    assert "not found" not in linked
    assert "libtorch_python" not in linked


def test_name_follows_sources_and_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = library._digest()
    assert library._digest() == before
    (tmp_path / "one.cpp").write_text("int x;")
    monkeypatch.setattr(library, "_SOURCES", tmp_path)
    changed = library._digest()
    (tmp_path / "one.cpp").write_text("int y;")
    assert len({before, changed, library._digest()}) == 3


def test_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RECFX_BUILD_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.build_directory() == tmp_path / "recfx"
    monkeypatch.setenv("RECFX_BUILD_DIR", str(tmp_path / "named"))
    assert library.build_directory() == tmp_path / "named"


@pytest.fixture
def tiny_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sources that compile in no time, and an empty build directory."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text("int recfx_one() { return 1; }")
    monkeypatch.setattr(library, "_SOURCES", sources)
    monkeypatch.setenv("RECFX_BUILD_DIR", str(tmp_path / "build"))
    return sources


def test_builds_once(tiny_sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="recfx"):
        first = library.build()
        second = library.build()
    assert first == second
    assert first.exists()
    assert [record.message for record in caplog.records if "compiling" in record.message] == [caplog.records[0].message]
    left = sorted(path.suffix for path in first.parent.iterdir())
    assert left == [".lock", ".so"], "scratch files stay behind"


def test_builds_once_for_all_who_ask_at_the_same_time(tiny_sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="recfx"), ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: library.build(), range(4)))
    assert len(set(built)) == 1
    assert len(caplog.records) == 1


def test_compiler_error_is_passed_on(tiny_sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny_sources / "one.cpp").write_text("this is not C++")
    with pytest.raises(library.LibraryBuildError, match=r"one\.cpp"):
        library.build()
    assert library.main() == 1
    assert "one.cpp" in capsys.readouterr().err
    assert not list(library.build_directory().glob("*.so"))


@pytest.mark.parametrize(
    ("compiler", "reason"), [("/no/such/compiler", "cannot be run"), ("", "no C++ compiler found")]
)
def test_without_compiler(tiny_sources: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    if not compiler:
        monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(library.LibraryBuildError) as caught:
        library.build()
    assert reason in str(caught.value)


def test_index_works_on_the_references_without_library(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": "/no/such/compiler", "RECFX_BUILD_DIR": str(tmp_path)}
    root = Path(__file__).resolve().parents[2]
    finished = subprocess.run(
        [sys.executable, "-c", FALLBACK_SCRIPT], capture_output=True, text=True, cwd=root, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "/no/such/compiler" in finished.stdout
    assert finished.stderr.count("C++ operators are not available") == 1
