"""The layout of the project: imports point down one list of packages, and no files import each other in a circle."""

from __future__ import annotations

import ast
import re
import subprocess
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.structure import LAYERS

ROOT = Path(__file__).resolve().parents[1]


def _modules() -> dict[str, Path]:
    """Every Python file of the project, by dotted name."""
    found = {}
    for folder, package in (("recfx", "recfx"), ("lowering", "recfx.lowering"), ("kernels", "recfx.kernels")):
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder != "recfx" or relative[0] not in ("lowering", "kernels"):  # links
                found[".".join((package, *relative)).removesuffix(".__init__")] = path
    return found


def _imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """The project's modules that a file imports, also inside functions and for type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                name if (name := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules.keys()


MODULES = _modules()
IMPORTS = {name: _imports(path, MODULES) - {name} for name, path in MODULES.items()}


def _layer(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_point_down() -> None:
    assert {_layer(name) for name in MODULES} == set(LAYERS)
    up = [
        f"{name} imports {imported}"
        for name, found in sorted(IMPORTS.items())
        for imported in sorted(found)
        if LAYERS.index(_layer(imported)) < LAYERS.index(_layer(name))
    ]
    assert not up, "\n".join(up)


def test_no_test_imports_another_test() -> None:
    """What several tests need lies in a file that is no test."""
    importing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [f"{node.module}.{alias.name}" for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split(".")[1:3])
    ]
    assert not importing, "\n".join(importing)


def test_the_repository_holds_text_alone() -> None:
    """A wheel, an archive or a checkpoint that was left behind would be in every clone for good.

    The small pictures that the README shows are the exception.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    binary = {str(path.relative_to(ROOT)) for path in files if path.is_file() and b"\0" in path.read_bytes()}
    pictures = set(re.findall(r"!\[[^]]+\]\(([\w/.]+\.png)\)", (ROOT / "README.md").read_text()))
    assert not binary - pictures, "\n".join(binary - pictures)
    assert [name for name in pictures if not 0 < (ROOT / name).stat().st_size < 200_000] == []
