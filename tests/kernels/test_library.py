import logging
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from recfx.kernels.build import library
from recfx.kernels.build.compiler import LibraryBuildError
from recfx.kernels.build.private_files import UnsafeError
from tests.support.forked_script import run_script

FALLBACK_SCRIPT = """
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
import recfx
from recfx.kernels.build import library
table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=2, feature_names=["f"])
plain = EmbeddingBagCollection(tables=[table])
batch = KeyedJaggedTensor(["f"], torch.tensor([1, 3]), lengths=torch.tensor([2]))
assert torch.allclose(recfx.convert(plain, (batch,))(batch).values(), plain(batch).values())
assert not library.load() and library.why_not()
print(library.why_not())
try:
    recfx.HashIndex(10)
except recfx.ConversionError as error:
    print(error.reason)
"""


def test_loads_and_needs_no_python_and_no_openmp_of_its_own() -> None:
    """Some builds of torch call theirs libgomp-a34b3233.so.1, for example; a second one would have its own threads."""
    assert library.why_not() == ""
    read = ["readelf", "--dynamic", "--wide", str(library.build())]
    needed = subprocess.run(read, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "[libtorch_cpu.so]" in needed
    assert "omp" not in needed
    assert "libtorch_python" not in needed


def test_name_follows_sources_and_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = library._digest()
    assert library._digest() == before
    (tmp_path / "one.cpp").write_text("int x;")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    changed = library._digest()
    (tmp_path / "one.cpp").write_text("int y;")
    assert len({before, changed, library._digest()}) == 3


def test_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RECFX_BUILD_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.build_directory() == tmp_path / "recfx"
    monkeypatch.setenv("RECFX_BUILD_DIR", "~/named")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library.build_directory() == tmp_path / "named"
    (tmp_path / "named").touch()
    with pytest.raises(NotADirectoryError, match="named is not a directory"):
        library.build()


@pytest.fixture
def tiny_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sources that compile in no time, and an empty build directory."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int recfx_one() { return 1; }')
    monkeypatch.setattr(library, "SOURCES", sources)
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


def test_signatures_are_read_from_the_sources() -> None:
    """Operators are declared with them where nothing can be compiled."""
    declared = {schema.partition("(")[0]: torch._C.parse_schema(f"recfx::{schema}") for schema in library.schemas()}
    assert {name: getattr(torch.ops.recfx, name).default._schema for name in declared} == declared
    assert set(library.REFERENCES) <= set(declared)
    assert len(declared) > 20


def test_compiler_error_is_passed_on(tiny_sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny_sources / "one.cpp").write_text("this is not C++")
    with pytest.raises(LibraryBuildError, match=r"one\.cpp"):
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
    with pytest.raises(LibraryBuildError) as caught:
        library.build()
    assert reason in str(caught.value)


def test_without_library_plain_tables_are_looked_up_and_indexes_refused(tmp_path: Path) -> None:
    finished = run_script(FALLBACK_SCRIPT, environment={"CXX": "/no/such/compiler", "RECFX_BUILD_DIR": str(tmp_path)})
    assert finished.returncode == 0, finished.stderr
    assert "/no/such/compiler" in finished.stdout
    assert finished.stdout.splitlines()[-1] == "no_library"
    assert finished.stderr.count("C++ operators are not available") == 1


def test_others_must_not_write_to_the_directory(tiny_sources: Path) -> None:
    library.build_directory().mkdir(mode=0o755)
    library.build_directory().chmod(0o777)
    with pytest.raises(UnsafeError, match=r"can be written to by others \(mode 777; chmod go-w it\)"):
        library.build()
    with pytest.raises(LibraryBuildError, match="mode 777"):
        library._open_library()
    assert not list(library.build_directory().iterdir())


def test_the_default_directory_becomes_the_users_own(
    tiny_sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RECFX_BUILD_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "cache" / "recfx"
    directory.mkdir(parents=True)
    directory.chmod(0o775)  # as under umask 002
    library.build()
    assert directory.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("planted", ["directory", "file"])
def test_another_users_library_is_not_taken(tiny_sources: Path, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    built = library.build()
    if os.geteuid() == 0:
        os.chown(built if planted == "file" else built.parent, 4321, 4321)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(UnsafeError, match="belongs to another user"):
        library.build()


def test_what_a_killed_process_left_goes(tiny_sources: Path) -> None:
    built = library.build()
    built.unlink()
    left = built.parent / f"build-{built.stem}-x1"
    left.mkdir()
    (left / "half.o").write_bytes(b"half")
    others = built.parent / "build-librecfx-of-another-version-x1"
    others.mkdir()
    library.build()
    assert not left.exists()
    assert others.exists(), "somebody may be building it"


def test_processes_that_build_at_once(tiny_sources: Path) -> None:
    script = (
        "import pathlib, sys; from recfx.kernels.build import library;"
        "library.SOURCES = pathlib.Path(sys.argv[1]); print(library.build())"
    )
    with ThreadPoolExecutor(2) as pool:
        finished = list(pool.map(lambda _: run_script(script, str(tiny_sources), environment=os.environ), range(2)))
    assert [done.returncode for done in finished] == [0, 0], finished
    assert len({done.stdout for done in finished}) == 1
    assert sum(done.stderr.count("compiling the C++ operators") for done in finished) == 1
    library.build()


def test_threads_load_once(tiny_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    registered: list[int] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "_when_defined", [lambda: registered.append(1)])
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: library.load(), range(8))) == [True] * 8
    assert (len(loaded), registered) == (1, [1])
