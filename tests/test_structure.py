"""The layout of the project: imports point down one list of packages, and no files import each other in a circle."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

from tests.structure import LAYERS, layer

ROOT = Path(__file__).resolve().parents[1]
LINKS = ("lowering", "kernels")
"""Folders beside ``recfx`` that are links in it."""


def _modules() -> dict[str, Path]:
    """Every Python file of the project, by dotted name."""
    modules = {}
    for folder, package in (("recfx", "recfx"), *((link, f"recfx.{link}") for link in LINKS)):
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder != "recfx" or relative[0] not in LINKS:
                modules[".".join((package, *relative)).removesuffix(".__init__")] = path
    return modules


Import = ast.Import | ast.ImportFrom


def _statements(text: str) -> list[Import]:
    """Every import of a file, also inside functions and for type checking."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


@functools.cache
def _statements_in(path: Path) -> list[Import]:
    return _statements(path.read_text())


def _imports(name: str, path: Path, statements: Iterable[Import], modules: Collection[str]) -> set[str]:
    """The modules among these that the module of this name imports, also relatively, and by the names of the links'
    targets: ``kernels`` is ``recfx.kernels``.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imported = set()
    for node in statements:
        if isinstance(node, ast.ImportFrom):
            base = _through_link(resolve_name("." * node.level + (node.module or ""), package))
            imported |= {of if (of := f"{base}.{alias.name}") in modules else base for alias in node.names}
        else:
            imported |= {_through_link(alias.name) for alias in node.names}
    return imported & set(modules)


def _through_link(module: str) -> str:
    return f"recfx.{module}" if module.split(".")[0] in LINKS else module


def _named(text: str, modules: Collection[str]) -> set[str]:
    """The modules among these that a file names in a string, to import them later."""
    return {
        node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and node.value in modules
    } - {"recfx"}


MODULES = _modules()
IMPORTS = {name: _imports(name, path, _statements_in(path), MODULES) - {name} for name, path in MODULES.items()}


def test_the_links_are_the_folders_and_are_imported_through_recfx() -> None:
    """``import kernels`` would be a second copy of the package, and only in the repository's root."""
    assert {path.name: path.resolve() for path in (ROOT / "recfx").iterdir() if path.is_symlink()} == {
        link: ROOT / link for link in LINKS
    }
    past_the_link = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("recfx", *LINKS, "tests", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in _statements_in(path)
        if (isinstance(node, ast.Import) and any(alias.name.split(".")[0] in LINKS for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] in LINKS)
    ]
    assert not past_the_link, "\n".join(past_the_link)


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_point_down() -> None:
    assert {layer(name) for name in MODULES} == set(LAYERS)
    up = [
        f"{name} imports {imported}"
        for name, imports in sorted(IMPORTS.items())
        for imported in sorted(imports | _named(MODULES[name].read_text(), MODULES))
        if LAYERS.index(layer(imported)) < LAYERS.index(layer(name))
    ]
    assert not up, "\n".join(up)


def test_the_map_names_the_packages_in_their_order() -> None:
    table = (ROOT / "recfx/README.md").read_text().partition("## The packages")[2].partition("\n## ")[0]
    first_cells = " ".join(re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE))
    named = re.findall(r"`(?:recfx/)?([\w/]+)(?:\.py)?`", first_cells)
    named = [name.replace("/", ".") for name in named]
    assert named == [layer for layer in LAYERS if layer not in ("__main__",)]


def test_passes_know_nothing_of_what_lives() -> None:
    """No store, process group, device or kernel, and no module."""
    for name, path in MODULES.items():
        if name.startswith("recfx.passes."):
            assert {layer(imported) for imported in IMPORTS[name]} <= {"passes", "ir", "errors"}, name
            given = {alias.name for statement in _statements_in(path) for alias in statement.names}
            assert not given & {"nn", "torch.nn", "torch.distributed"}, name


def test_what_is_imported_of_the_project_is_there() -> None:
    """A file that has moved is noticed here, before the tests that import it are run."""
    bound = {name: _bound(path.read_text()) | {"*"} for name, path in MODULES.items()}
    bound["recfx"] |= bound["recfx.api"]  # which it imports with a star
    others = [path for folder in ("tests", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    gone = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
        for path in [*MODULES.values(), *others]
        for node in _statements_in(path)
        if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] == "recfx"
        for alias in node.names
        if alias.name not in bound.get(str(node.module), ()) and f"{node.module}.{alias.name}" not in MODULES
    ]
    assert len(others) > 300
    assert not gone, "\n".join(gone)


def _bound(text: str) -> set[str]:
    """The names that a file binds, here or there."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_no_test_imports_another_test() -> None:
    """What several tests need lies in a file that is no test."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "tests").rglob("*.py")}
    tests = {name for name in files if name.rpartition(".")[2].startswith("test_")}
    assert len(tests) > 100
    importing = [
        f"{name} imports {imported}"
        for name, path in sorted(files.items())
        for imported in sorted(_imports(name, path, _statements_in(path), tests))
    ]
    assert not importing, "\n".join(importing)


def test_the_package_shows_its_public_names_alone() -> None:
    recfx = importlib.import_module("recfx")  # here: the other tests name the circle if it cannot be
    assert dir(recfx) == sorted(recfx.__all__)
    for name in ("compat.hybrid_torchrec", "hashing", "ir", "passes"):
        package = importlib.import_module(f"recfx.{name}")
        assert dir(package) == sorted(package.__all__)
    packages = {name for name in vars(recfx) if f"recfx.{name}" in MODULES}
    assert {name for name in vars(recfx) if not name.startswith("__")} - packages <= set(recfx.__all__)


def test_recfx_does_not_import_its_own_public_names() -> None:
    """``from recfx import`` would import all of them, among them the one that is being imported."""
    named = [name for name, path in MODULES.items() for node in _statements_in(path) if _is_of_recfx_itself(node)]
    assert not named, "\n".join(named)


def _is_of_recfx_itself(node: Import) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and node.module == "recfx"
    return any(alias.name == "recfx" for alias in node.names)


def test_no_name_hides_a_module() -> None:
    """``import recfx.passes`` binds ``recfx``: what code then reads is the attribute."""
    assert importlib.import_module("recfx").passes
    loaded = [name for name in MODULES if name != "recfx" and name in sys.modules]
    assert "recfx.passes" in loaded
    for name in loaded:
        package, _, attribute = name.rpartition(".")
        assert getattr(sys.modules[package], attribute) is sys.modules[name], name


def test_the_quick_tests_of_the_makefile_are_there() -> None:
    """pytest runs nothing at all if one of them is not."""
    named = re.findall(r"addprefix (?:--ignore=)?tests/,([^)]+)\)", (ROOT / "Makefile").read_text())
    names = " ".join(named).split()
    assert len(names) > 8
    assert [name for name in names if not (ROOT / "tests" / name).exists()] == []


MOST_LINES = {"product": 46_300, "tests": 63_000, "tools": 5_500}
"""The most lines of Python in ``recfx``, ``kernels`` and ``lowering``, in ``tests``, and in what of it are tools and
benchmarks. What a change adds, it finds room for.
"""


def test_the_project_does_not_grow() -> None:
    folders = {"product": ("recfx", *LINKS), "tests": ("tests",), "tools": ("tests/tools", "tests/bench")}
    listed = {name: [path for folder in of for path in (ROOT / folder).rglob("*.py")] for name, of in folders.items()}
    files = {name: {path.resolve() for path in paths} for name, paths in listed.items()}
    lines = {name: sum(path.read_text().count("\n") for path in paths) for name, paths in files.items()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES[name]} == {}


def test_the_repository_holds_text_alone() -> None:
    """A wheel, an archive or a checkpoint that was left behind would be in every clone for good.

    The small pictures that READMEs show are the exception.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True, timeout=60
    ).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    binary = {str(path.relative_to(ROOT)) for path in files if path.is_file() and b"\0" in path.read_bytes()}
    pictures = {
        str((page.parent / shown).resolve().relative_to(ROOT))
        for page in files
        if page.name == "README.md" and page.is_file()
        for shown in re.findall(r"!\[[^]]+\]\(([\w/.]+\.png)\)", page.read_text())
    }
    assert not binary - pictures, "\n".join(binary - pictures)
    assert [name for name in pictures if not 0 < (ROOT / name).stat().st_size < 200_000] == []
