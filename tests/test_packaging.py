"""The package holds what it needs and imports alike from a wheel, an sdist, an editable install and a bare checkout.

Builds run on a copy of the sources, through setuptools' build backend as it is installed: no network, no torch.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it too

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = Path(".packaging/fbgemm-gpu")
DESCRIPTION = Path(".packaging/description.md")
BACKEND = Path(".packaging/build_backend.py")
LINKED = ("kernels", "lowering")

CSRC = {
    f"recfx/{path.relative_to(ROOT)}" for pattern in ("*.cpp", "*.h") for path in ROOT.glob(f"kernels/csrc/*/{pattern}")
}
MODULES = {
    *(str(path.relative_to(ROOT)) for path in ROOT.glob("recfx/**/*.py")),
    *(f"recfx/{path.relative_to(ROOT)}" for folder in LINKED for path in ROOT.glob(f"{folder}/**/*.py")),
}

ASSETS = {
    str(path.relative_to(ROOT)) for path in (ROOT / "recfx/inspect/drawing/assets").rglob("*") if path.suffix != ".pyc"
}
ASSETS = {name for name in ASSETS if (ROOT / name).is_file()}
BUILD = """
import sys
sys.path.insert(0, ".packaging")
try:
    import build_backend
except ImportError:  # another project's
    from setuptools import build_meta as build_backend
for kind, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    getattr(build_backend, "build_" + kind)(folder)
"""

BESIDE = """
import site, sys
editable, *path = sys.argv[1:]
sys.meta_path[:] = [one for one in sys.meta_path if not getattr(one, "__module__", "").startswith("__editable__")]
for module in [name for name in sys.modules if name.startswith("__editable__")]:
    del sys.modules[module]
sys.path[:0] = [*path, editable]
site.addsitedir(editable)
import recfx
print(recfx.__file__)
"""

# One process imports torch and TorchRec once; a child a place then imports recfx from there and only from there.
IMPORT_FROM_EACH = """
import os, site, sys
import torch, torchrec
def editable(module):
    return module.startswith("__editable__")
sys.meta_path[:] = [finder for finder in sys.meta_path if not editable(getattr(finder, "__module__", ""))]
for module in filter(editable, list(sys.modules)):
    del sys.modules[module]
for place, root in zip(sys.argv[1::2], sys.argv[2::2]):
    child = os.fork()
    if child == 0:
        sys.path.insert(0, place)
        site.addsitedir(place)
        import recfx, recfx.kernels, recfx.lowering
        for module in (recfx, recfx.kernels, recfx.lowering):
            assert module.__file__.startswith(root + os.sep), (place, module.__file__)
        sources = os.path.join(recfx.kernels.__path__[0], "csrc", "index")
        assert any(name.endswith(".cpp") for name in os.listdir(sources))
        for name in ("kernels", "lowering"):
            try:
                __import__(name)
            except ImportError:
                continue
            assert place == root and os.path.islink(os.path.join(root, "recfx", name)), f"{place}: top-level {name}"
        sys.stdout.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, place
print("imported")
"""


def run_python(script: str, *arguments: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_sources(target: Path) -> Path:
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    target.mkdir()
    for name in ("recfx", *LINKED, STAND_IN, "examples/serve_cpp"):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in", DESCRIPTION, BACKEND):
        shutil.copy2(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``checkout`` and, unpacked, its ``wheel``, ``sdist``, ``sdist-wheel`` and ``editable``."""
    base = tmp_path_factory.mktemp("packaging")
    checkout = copy_sources(base / "checkout")
    run_python(BUILD, "sdist", base / "dist-sdist", "wheel", base / "dist-wheel", cwd=checkout)
    unpack(base / "dist-sdist", base / "sdist")
    unpack(base / "dist-wheel", base / "wheel")
    run_python(BUILD, "wheel", base / "dist-sdist-wheel", cwd=base / "sdist")
    unpack(base / "dist-sdist-wheel", base / "sdist-wheel")
    run_python(BUILD, "editable", base / "dist-editable", cwd=checkout)
    unpack(base / "dist-editable", base / "editable")
    return base


def unpack(folder: Path, target: Path) -> None:
    (archive,) = folder.iterdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target)
        return
    with tarfile.open(archive) as sdist:
        sdist.extractall(target.parent / "sdist-unpacked", filter="data")
    (top,) = (target.parent / "sdist-unpacked").iterdir()
    top.rename(target)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", ["wheel", "sdist", "sdist-wheel"])
def test_holds_every_module_and_the_cpp_sources(built: Path, form: str) -> None:
    packed = files(built / form)
    assert CSRC
    assert packed >= MODULES | CSRC | ASSETS | {"recfx/py.typed"}
    assert "recfx/inspect/drawing/assets/licenses/Graphviz-EPL-2.0.txt" in ASSETS
    page_engine = "recfx/inspect/drawing/assets/viz-global.js"  # its licence is that of the bytes that were published
    assert (built / form / page_engine).read_bytes() == (ROOT / page_engine).read_bytes()
    assert not any(path.is_symlink() for path in (built / form).rglob("*"))


def test_the_layout_engine_is_the_one_that_was_published() -> None:
    """Its licences, and the addresses of its sources, are those of this version."""
    engine = (ROOT / "recfx/inspect/drawing/assets/viz-global.js").read_bytes()
    assert hashlib.sha256(engine).hexdigest() == "c9e0b310f9883910e01c66054b48b7ff4be3d8695141116635e72b0af152692e"
    assert engine.startswith(b"/*!\nViz.js 3.31.0\n")
    assert "@viz-js/viz, version 3.31.0" in (ROOT / "recfx/inspect/drawing/assets/licenses/README.txt").read_text()


@pytest.mark.parametrize("form", ["wheel", "sdist-wheel"])
def test_wheel_has_one_import_root(built: Path, form: str) -> None:
    roots = {path.name for path in (built / form).iterdir()}
    assert {name for name in roots if not name.endswith(".dist-info")} == {"recfx"}
    (info,) = (built / form).glob("*.dist-info")
    assert "Root-Is-Purelib: true" in (info / "WHEEL").read_text()
    assert "Apache License" in (info / "licenses/LICENSE").read_text()
    assert (
        "Eclipse Public License"
        in (info / "licenses/recfx/inspect/drawing/assets/licenses/Graphviz-EPL-2.0.txt").read_text()
    )


def test_imports_alike_from_everywhere(built: Path) -> None:
    places = {
        built / "wheel": built / "wheel",
        built / "sdist": built / "sdist",
        built / "sdist-wheel": built / "sdist-wheel",
        built / "editable": built / "checkout",
        ROOT: ROOT,
    }
    pairs = [path for pair in places.items() for path in pair]
    assert run_python(IMPORT_FROM_EACH, *pairs, cwd=built).endswith("imported\n")


def test_an_editable_install_is_found_beside_a_clone(built: Path, tmp_path: Path) -> None:
    """A package that is on the path still comes first."""
    installed, beside, other = str(built / "checkout/recfx/__init__.py"), tmp_path / "beside", tmp_path / "other/recfx"
    beside.mkdir()
    (beside / "recfx").symlink_to(built / "checkout")
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    editable = built / "editable"
    assert run_python(BESIDE, editable, cwd=tmp_path).strip() == installed
    assert run_python(BESIDE, editable, beside, cwd=tmp_path).strip() == installed
    assert run_python(BESIDE, editable, beside, other.parent, cwd=tmp_path).strip() == str(other / "__init__.py")


def test_builds_need_no_torch() -> None:
    for project in (ROOT, ROOT / STAND_IN):
        settings = tomllib.loads((project / "pyproject.toml").read_text())
        assert [Requirement(text).name for text in settings["build-system"]["requires"]] == ["setuptools"]


def test_versions_are_of_one_release(built: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'__version__ = "{version}"' in (ROOT / "recfx/versions/__init__.py").read_text()
    assert re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version
    (info,) = (built / "wheel").glob("*.dist-info")
    assert (info / "entry_points.txt").read_text() == "[console_scripts]\nrecfx = recfx.__main__:run\n"
