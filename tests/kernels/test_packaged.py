"""The libraries that a wheel carries: which one is taken, and what happens where none serves."""

from pathlib import Path

import pytest
import torch

from recfx.kernels.build import compiler, library
from recfx.kernels.build.compiler import library_name, packaged_library


def write(torch_version: str, sources: Path) -> Path:
    path = compiler.LIBRARIES / library_name(torch_version, sources)
    path.write_bytes(b"a library")
    return path


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The sources of a wheel that holds a library for the torch that is installed."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int recfx_one() { return 1; }')
    monkeypatch.setattr(library, "SOURCES", sources)
    monkeypatch.setattr(library, "_path", None)
    monkeypatch.setattr(compiler, "LIBRARIES", tmp_path)
    monkeypatch.setenv("RECFX_BUILD_DIR", str(tmp_path / "build"))
    write(torch.__version__, sources)
    return sources


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was loaded, in order; what is no ELF file cannot be."""
    loaded: list[Path] = []
    monkeypatch.setattr(torch.ops, "load_library", lambda path: loaded.append(Path(path)))
    return loaded


def test_it_is_loaded_without_a_compiler_whoever_owns_it(
    sources: Path, loaded: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    (packaged_one,) = compiler.LIBRARIES.glob("*.so")
    packaged_one.chmod(0o666)
    library._open_library()
    assert loaded == [packaged_one]
    assert library.loaded_path() == packaged_one
    assert library.main() == 0
    assert capsys.readouterr().out.strip() == str(packaged_one)


@pytest.mark.parametrize(
    ("version", "serves"), [("2.13.0", True), ("2.13.1+cu130", True), ("2.13.0a0+git1234", True), ("2.1.3", False)]
)
def test_it_serves_one_minor_version(sources: Path, version: str, serves: bool) -> None:
    write("2.13.0", sources)
    assert (packaged_library(version, True, sources) is not None) == serves
    assert packaged_library(version, False, sources) is None


def test_it_is_not_taken_for_other_sources(sources: Path) -> None:
    (sources / "two.h").write_text("int two;")
    assert packaged_library(torch.__version__, True, sources) is None


def test_one_that_cannot_be_loaded_is_the_first_reason_why_there_is_none(
    sources: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (packaged_one,) = compiler.LIBRARIES.glob("*.so")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    for name, value in (("_loaded", None), ("_reason", ""), ("_when_defined", [])):
        monkeypatch.setattr(library, name, value)
    assert not library.load()
    why = f"{packaged_one} cannot be loaded"
    assert caplog.messages[0].startswith(why)
    assert library.why_not().startswith(why)
    assert "the C++ compiler /no/such/compiler cannot" in library.why_not()
    assert library.main() == 1
    assert capsys.readouterr().err.startswith(why)


def test_one_that_cannot_be_loaded_makes_way_for_one_that_is_compiled(
    sources: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packaged_one,) = compiler.LIBRARIES.glob("*.so")
    loaded: list[Path] = []

    def load_library(path: str) -> None:
        if Path(path) == packaged_one:
            raise OSError("Could not load this library") from OSError(f"{packaged_one}: undefined symbol")
        loaded.append(Path(path))

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    library._open_library()
    assert [path.parent for path in loaded] == [library.build_directory()]
    assert caplog.messages[0] == f"{packaged_one} cannot be loaded: undefined symbol. What to do: install recfx again."
